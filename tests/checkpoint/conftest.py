"""What the checkpoint tests share."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    return tmp_path / "files" / "tiny.gguf"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB. Skips where the tests may not mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = shutil.which("mount") and os.geteuid() == 0
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if not mounted or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)

"""The libraries of others in the dashboard are the files of their npm packages, with their licences."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest

from stoker.gateway.ui.static_pages import STATIC_DIR

VENDOR = STATIC_DIR / "vendor"
PACKAGES: list[dict[str, Any]] = tomllib.loads((VENDOR / "vendor.toml").read_text(encoding="utf-8"))["package"]


def test_every_file_is_listed_with_its_checksum() -> None:
    listed = {file["name"]: file["sha256"] for package in PACKAGES for file in package["file"]}
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VENDOR.iterdir()}
    del found["vendor.toml"]
    assert found == listed


@pytest.mark.parametrize("package", PACKAGES, ids=lambda one: one["name"])
def test_every_package_has_its_licence(package: dict[str, Any]) -> None:
    [licence] = [file["name"] for file in package["file"] if file["path"] == "LICENSE"]
    words = {"MIT": "MIT License", "Apache-2.0": "Apache License"}[package["licence"]]
    assert words in (VENDOR / licence).read_text(encoding="utf-8").replace("The MIT License (MIT)", "MIT License")


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES, ids=lambda one: one["name"])
def test_the_files_are_those_of_the_package(package: dict[str, Any], tmp_path: Path) -> None:
    """Slow, because it downloads the packages. Skipped without npm or a network."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    name = f"{package['name']}@{package['version']}"
    packed = subprocess.run(["npm", "pack", name], cwd=tmp_path, capture_output=True, timeout=120, check=False)
    if packed.returncode:
        pytest.skip(f"npm cannot download {name}")
    [archive] = tmp_path.glob("*.tgz")
    digest = hashlib.sha512(archive.read_bytes()).digest()
    assert package["integrity"] == f"sha512-{base64.b64encode(digest).decode()}"
    with tarfile.open(archive) as files:
        for file in package["file"]:
            stored = files.extractfile(f"package/{file['path']}")
            assert stored is not None
            assert stored.read() == (VENDOR / file["name"]).read_bytes()

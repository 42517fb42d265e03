"""The wheel has everything that `pip install` needs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import stoker

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    # A copy, because setuptools writes into the folder that it builds from. The environment's setuptools needs no network.
    source = folder / "source"
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("this is not a git checkout")
    for name in tracked.stdout.splitlines():
        if (name.startswith("stoker/") or "/" not in name) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "-w", folder, source]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_has_all_files_of_the_package(wheel: zipfile.ZipFile) -> None:
    packed = set(wheel.namelist())
    listed = subprocess.run(["git", "ls-files", "stoker"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    assert files - packed == set()
    assert not [name for name in packed if name.startswith(("tests/", "bench/"))]


def test_the_version_has_one_place(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    assert Parser().parsestr(wheel.read(name).decode())["Version"] == stoker.__version__
    assert "version" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_wheel_has_the_command_and_the_type_marker(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    assert "stoker = stoker.cli.main:main" in wheel.read(name).decode()
    assert "stoker/py.typed" in wheel.namelist()


def test_the_changelog_has_this_version_and_what_comes_next() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert stoker.__version__ in headings

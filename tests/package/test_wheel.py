"""The wheel and the source distribution have everything that `pip install` needs."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import stoker

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the package's files, because setuptools writes into the folder that it builds from."""
    source = tmp_path_factory.mktemp("source")
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("this is not a git checkout")
    for name in tracked.stdout.splitlines():
        if (name.startswith("stoker/") or "/" not in name) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    # The environment's setuptools needs no network.
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


def test_the_source_distribution_has_what_a_wheel_is_built_from(source: Path, tmp_path: Path) -> None:
    build = f"from setuptools.build_meta import build_sdist; print(build_sdist({str(tmp_path)!r}))"
    built = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (path,) = tmp_path.glob("*.tar.gz")
    assert path.name == f"stoker-{stoker.__version__}.tar.gz"
    with tarfile.open(path) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    needed = {one.relative_to(source).as_posix() for one in (source / "stoker").rglob("*") if one.is_file()}
    needed |= {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO"}
    assert needed - names == set()
    assert not [name for name in names if name.startswith(("tests/", "bench/"))]


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

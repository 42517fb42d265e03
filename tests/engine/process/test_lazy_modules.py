"""Parts of torch that an engine never uses are imported at their first use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.engine.process.lazy_modules import lazily_imported

PACKAGE = {"__init__.py": "import {name}.sub, {name}.other\nhere = 1\n", "other.py": "x = 2\n"}
SUB = {"__init__.py": "from {name}.sub.part import value\nran = True\n", "part.py": "value = 3\n"}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"lazy_{tmp_path.name}"
    for folder, files in ((tmp_path / name, PACKAGE), (tmp_path / name / "sub", SUB)):
        folder.mkdir()
        for file, text in files.items():
            (folder / file).write_text(text.format(name=name))
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def imported(name: str) -> object:
    with lazily_imported(f"{name}.sub", f"{name}.missing"):
        return __import__(name)


def test_a_module_runs_at_its_first_use(package: str) -> None:
    module = imported(package)
    assert module.here == 1  # type: ignore[attr-defined]
    assert f"{package}.sub.part" not in sys.modules
    assert not hasattr(module.sub, "__wrapped__")  # type: ignore[attr-defined]
    assert f"{package}.sub.part" not in sys.modules
    assert module.sub.value == 3  # type: ignore[attr-defined]
    assert module.sub.ran  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        _ = module.sub.unknown  # type: ignore[attr-defined]


def test_importing_a_part_runs_its_package_first(package: str) -> None:
    module = imported(package)
    part = __import__(f"{package}.sub.part", fromlist=["value"])
    assert part.value == 3
    assert vars(module.sub)["ran"]  # type: ignore[attr-defined]


def test_an_engine_does_not_import_what_it_never_uses() -> None:
    code = (
        "import sys; from stoker.engine.process import start, lazy_modules\n"
        "with lazy_modules.lazily_imported(*start._UNUSED_MODULES):\n"
        "    import stoker.engine.process.main\n"
        "assert 'torch._decomp' not in sys.modules, 'torch._decomp'\n"
        "import torch\n"
        "assert torch.export.export and torch.distributions.Normal(0.0, 1.0).sample().shape == ()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]

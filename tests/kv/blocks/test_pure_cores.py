"""The scheduler and the block pool have no clock and do no I/O: the time is an argument."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import stoker

ROOT = Path(stoker.__file__).parent
IMPURE = {"asyncio", "datetime", "os", "random", "socket", "subprocess", "threading", "time"}
MODULES = sorted(path for package in ("sched", "kv/blocks") for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_pure_module_imports_no_clock_and_no_io(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            imported.add(node.module.partition(".")[0])
    assert imported & IMPURE == set()

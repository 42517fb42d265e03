"""A class name means one thing in the project, so that a reader can search for it."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import stoker

ROOT = Path(stoker.__file__).parent


def test_class_names_are_unique() -> None:
    """A leading underscore does not make a name different."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}

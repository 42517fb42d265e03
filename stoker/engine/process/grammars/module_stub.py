"""A stand-in for a module that another one imports and does not need here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextmanager
def standing_in(name: str) -> Iterator[None]:
    """Within it, importing `name` gives a module that has a class of every name, unless the real one is loaded already."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = _StandIn(name)
    try:
        yield
    finally:
        del sys.modules[name]

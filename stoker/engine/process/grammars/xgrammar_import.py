"""Imports xgrammar without transformers.

xgrammar imports transformers for the types of tokenizers that Stoker never passes to it. That import would take most of a
second of every start, so a stub module replaces it. Other modules import `xgrammar` from here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


class _StubModule(ModuleType):
    """A module that has a class for every name."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextmanager
def _stub_module(name: str) -> Iterator[None]:
    """Replace the module `name` by a stub inside the block, unless the real one is already imported."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = _StubModule(name)
    try:
        yield
    finally:
        del sys.modules[name]


with _stub_module("transformers"):
    import xgrammar

__all__ = ["xgrammar"]

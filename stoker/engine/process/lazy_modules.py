"""Lets parts of a library be imported at their first use instead of with the library.

`import torch` takes 4 s on a slow machine. A quarter of that is for tracing and exporting models, which an engine never
does.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_lock = threading.RLock()


class _LazyModule(ModuleType):
    """A module whose code has not run. Asking for what it would define runs the code."""

    def __getattr__(self, name: str) -> object:
        # Some tools look through all modules for special names. That is no use of this module.
        if name.startswith("__") and name not in ("__path__", "__all__"):
            raise AttributeError(name)
        with _lock:
            lazy = self.__dict__.pop("_lazy", None)
            if lazy is not None:
                lazy.run(self)
        return object.__getattribute__(self, name)


class _LazyLoader(Loader):
    """Postpones what another loader does."""

    def __init__(self, spec: ModuleSpec) -> None:
        assert spec.loader is not None
        self._loader, self._locations = spec.loader, spec.submodule_search_locations

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _LazyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.pop("__path__", None)  # importing a part of this package is a use of it
        module.__dict__["_lazy"] = self

    def run(self, module: ModuleType) -> None:
        if self._locations is not None:
            module.__path__ = self._locations
        self._loader.exec_module(module)


class _LazyFinder(MetaPathFinder):
    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname in self._names else None
        if spec is not None and spec.loader is not None:
            spec.loader = _LazyLoader(spec)
        return spec


@contextmanager
def lazily_imported(*names: str) -> Iterator[None]:
    """Postpone the code of these modules, if they are imported in the block, until something is taken from them."""
    finder = _LazyFinder(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)

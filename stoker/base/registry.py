"""A registry finds its entries by importing every module of one package, so that adding a file is the only edit."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from stoker.base.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Entries by name, from all modules of `package`. `kind` is what an entry is called in error messages."""

    def __init__(self, kind: str, package: str) -> None:
        self._kind = kind
        self._package = package
        self._entries: dict[str, T] = {}
        self._scanned = False

    def register(self, *names: str) -> Callable[[T], T]:
        """Return a decorator that registers an entry under these names."""

        def add(entry: T) -> T:
            for name in names:
                if name in self._entries:
                    raise ConfigError(f"two {self._kind} entries have the name {name!r}")
                self._entries[name] = entry
            return entry

        return add

    def get(self, name: str, setting: str = "") -> T:
        """Return the entry. Raise ConfigError, which lists the available names, if there is none.

        `setting` is where the name was given, such as "--kv-tier", for the error.
        """
        self._scan()
        if name not in self._entries:
            where = f"{setting}: " if setting else ""
            raise ConfigError(f"{where}unknown {self._kind} {name!r}; available: {', '.join(sorted(self._entries))}")
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        self._scan()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._scan()
        return iter(sorted(self._entries))

    def _scan(self) -> None:
        if self._scanned:
            return
        package = importlib.import_module(self._package)
        for module in pkgutil.walk_packages(package.__path__, f"{self._package}."):
            importlib.import_module(module.name)
        self._scanned = True

"""The files that a gateway reads, for a gateway on another machine: they are sent there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stoker.base.errors import ConfigError
from stoker.base.paths import expand_home

Keys = Iterable[Sequence[str]]  # settings of the gateway that name files which it reads


def with_sent_files(table: Mapping[str, Any], keys: Keys) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the gateway's table with a name in place of each file, and the files by these names."""
    files: dict[str, Path] = {}

    def name_of(path: str) -> str:
        name = f"<file-{len(files)}>"
        files[name] = expand_home(path)
        return name

    def named(value: Any, key: Sequence[str]) -> Any:
        if isinstance(value, list):
            return [named(one, key) for one in value]
        if not key:
            return name_of(str(value))
        if not isinstance(value, Mapping) or key[0] not in value:
            return value
        return {**value, key[0]: named(value[key[0]], key[1:])}

    new: Any = dict(table)
    for key in keys:
        new = named(new, key)
    return new, files


def check_readable(table: Mapping[str, Any], keys: Keys) -> None:
    """Raise ConfigError, which names the setting, if a file cannot be read."""
    for key in keys:
        for path in _values(table, key):
            try:
                expand_home(path).open("rb").close()
            except OSError as error:
                raise ConfigError(f"gateway.{'.'.join(key)}={path}: cannot be read: {error.strerror}") from error


def _values(value: Any, key: Sequence[str]) -> Iterator[str]:
    if isinstance(value, list):
        for one in value:
            yield from _values(one, key)
    elif not key:
        yield str(value)
    elif isinstance(value, Mapping) and key[0] in value:
        yield from _values(value[key[0]], key[1:])

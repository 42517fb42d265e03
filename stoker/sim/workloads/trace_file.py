"""Reading trace files: numbered lines, and fields whose errors name the line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stoker.base.errors import ConfigError
from stoker.loadgen.prompts import numbered_lines

_MAX_TOKENS = 1 << 27  # of one request; more is a damaged trace


def trace_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSON Lines file with the place of each, such as `trace.jsonl, line 7`."""
    for number, row in numbered_lines(path):
        where = f"{path}, line {number}"
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: is not an object")
        yield where, row


def number_field(row: dict[str, Any], name: str, where: str, *, least: float = 0.0) -> float:
    """Return a number of a row. Raise ConfigError if it is missing, of another type, or too small."""
    if name not in row:
        raise ConfigError(f"{where}: the field {name!r} is missing")
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e15:
        raise ConfigError(f"{where}: {name}={value!r}: must be a number of at least {least:g} and below 1e15")
    return float(value)


def length_field(row: dict[str, Any], name: str, where: str, *, least: int = 1) -> int:
    """Return a length in tokens."""
    value = number_field(row, name, where, least=least)
    if value > _MAX_TOKENS or value != int(value):
        raise ConfigError(f"{where}: {name}={row[name]!r}: must be a whole number of tokens, at most {_MAX_TOKENS}")
    return int(value)


def output_field(row: dict[str, Any], name: str, where: str) -> int:
    """Return the length of an answer. Recorded answers that were broken off before their first token count as one token."""
    return max(1, length_field(row, name, where, least=0))


def check_order(time_s: float, last_s: float, where: str, name: str) -> None:
    if time_s < last_s:
        raise ConfigError(f"{where}: {name} goes back from {last_s:g} s to {time_s:g} s; sort the trace by time")

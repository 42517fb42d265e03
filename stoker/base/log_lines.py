"""Log lines: JSON in ASCII, with a maximum length. No value can begin a line of its own, or fill the disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# As long as a write to a pipe that is never mixed with the writes of other processes (PIPE_BUF on Linux).
MAX_LINE_BYTES = 4096
_MAX_TEXT_CHARS = (2048, 256, 32)  # of one value; a shorter limit is used if the line is still too long
_MAX_ITEMS = (32, 8, 2)  # of a list or a table
_MAX_DEPTH = 4
_BASE_FIELDS = ("time", "level", "part", "event")


def log_line(fields: Mapping[str, Any]) -> bytes:
    """Return one line of at most MAX_LINE_BYTES, with its newline. Long values are shortened, and say so.

    Everything that is not printable ASCII is escaped: newlines, terminal control sequences, invalid surrogates.
    """
    for max_chars, max_items in zip(_MAX_TEXT_CHARS, _MAX_ITEMS, strict=True):
        line = _encoded({name: _shortened(value, max_chars, max_items) for name, value in fields.items()})
        if len(line) <= MAX_LINE_BYTES:
            return line
    kept = {name: _shortened(fields[name], 32, 2) for name in _BASE_FIELDS if name in fields}
    return _encoded({**kept, "fields_dropped": len(fields) - len(kept)})


def _encoded(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, default=str).replace("\x7f", "\\u007f").encode("ascii") + b"\n"


def _shortened(value: Any, max_chars: int, max_items: int, depth: int = 0) -> Any:
    if isinstance(value, str):
        return _shortened_text(value, max_chars)
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 64):
        return value
    if depth < _MAX_DEPTH and isinstance(value, list | tuple | set | frozenset):
        items = [
            _shortened(item, max_chars, max_items, depth + 1) for _, item in zip(range(max_items), value, strict=False)
        ]
        return items if len(value) <= max_items else [*items, f"… ({len(value)} items)"]
    if depth < _MAX_DEPTH and isinstance(value, dict):
        pairs = list(zip(range(max_items), value.items(), strict=False))
        table = {
            _shortened_text(str(name), 64): _shortened(item, max_chars, max_items, depth + 1)
            for _, (name, item) in pairs
        }
        return table if len(value) <= max_items else {**table, "…": f"{len(value)} items"}
    return _shortened_text(hex(value) if isinstance(value, int) else str(value), max_chars)


def _shortened_text(text: str, max_chars: int) -> str:
    """Keep the start and the end: the end of a traceback has the error."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]} … ({len(text)} characters) … {text[-half:]}"

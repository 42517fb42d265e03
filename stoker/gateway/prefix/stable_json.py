"""Leaves volatile lines out of the raw JSON of a request (`base/volatile_lines.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.base.volatile_lines import VOLATILE_LINES, volatile_pattern

_SEARCHED_BYTES = 4096  # volatile lines are looked for in the first bytes of a field


class StableJson:
    """Removes a volatile line from a field of a request body."""

    def __init__(self, volatile_lines: Sequence[str] = VOLATILE_LINES) -> None:
        self._pattern = volatile_pattern(volatile_lines)
        self._starts = [line.encode() for line in volatile_lines if line]

    def of(self, text: memoryview) -> memoryview:
        """Return the JSON without a volatile line near its start."""
        head = bytes(text[:_SEARCHED_BYTES])
        if not any(start in head for start in self._starts):  # much faster than the pattern
            return text
        if self._pattern is None or (found := self._pattern.search(text, 0, _SEARCHED_BYTES)) is None:
            return text
        return memoryview(b"".join((text[: found.start()], text[found.end() :])))

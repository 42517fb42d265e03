"""Find stop strings in streamed text, also across chunk borders.

Only text that may be the start of a stop string is held back. This module does not know tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker.base.errors import InvalidRequest


def open_chars(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may be the start of one of `marks`."""
    longest = max(map(len, marks), default=0)
    for count in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-count:]
        if any(mark.startswith(tail) for mark in marks):
            return count
    return 0


class StopStrings:
    """Ends the text at the stop string that is complete first; of two that end together, at the longer one."""

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if "" in stops:
            raise InvalidRequest("a stop string must not be empty", param="stop")
        self._stops = tuple(dict.fromkeys(stops))
        self._include_stop = include_stop
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """Return the text that can be sent. After a stop string was found, it is empty."""
        if self.stopped is not None or not self._stops:
            return "" if self.stopped is not None else text
        text = self._held + text
        # (end, start): earliest end first, then the earlier start, which is the longer stop.
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self.stopped = text[start:end]
            self._held = ""
            return text[: end if self._include_stop else start]
        keep = open_chars(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return what was held back. Call this when the stream has ended."""
        held, self._held = self._held, ""
        return held

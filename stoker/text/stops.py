"""Stop strings in a stream of text, wherever the chunks' borders fall.

It holds back only what may still become a stop string. It refuses to know tokens and who asked for the stops.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker.base.errors import InvalidRequest


def open_chars(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `marks`."""
    longest = max(map(len, marks), default=0)
    for count in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-count:]
        if any(mark.startswith(tail) for mark in marks):
            return count
    return 0


class StopStrings:
    """The stop that is complete first ends the text; of two complete at the same character, the longer one."""

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if "" in stops:
            raise InvalidRequest("an empty stop string would end every answer before its first character", param="stop")
        self._stops = tuple(dict.fromkeys(stops))
        self._include_stop = include_stop
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """The text that is safe to send on. After a stop was found: nothing more."""
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
        """The stream has ended: what was held back became no stop string."""
        held, self._held = self._held, ""
        return held

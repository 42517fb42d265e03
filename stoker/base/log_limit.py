"""EventLimiter: at most N log lines per second and event, so that a client cannot flood the log. Its caller has the clock."""

from __future__ import annotations

from dataclasses import dataclass

_WINDOW_S = 1.0
_MAX_NAMES = 1000  # events are named in the code; only foreign libraries could have more


@dataclass(slots=True)
class _Window:
    start_s: float
    lines: int = 0
    suppressed: int = 0


class EventLimiter:
    """Counts the lines of each event in windows of one second."""

    def __init__(self, max_per_s: int = 20) -> None:
        self._max_per_s = max_per_s
        self._windows: dict[str, _Window] = {}
        self._num_suppressed = 0

    def admit(self, name: str, now: float) -> bool:
        """Return True if a line of this event may be written now. If not, it is counted."""
        window = self._windows.get(name)
        if window is None:
            if len(self._windows) >= _MAX_NAMES:
                self._windows = {known: one for known, one in self._windows.items() if one.suppressed}
            window = self._windows[name] = _Window(now)
        elif now - window.start_s >= _WINDOW_S:
            window.start_s, window.lines = now, 0
        window.lines += 1
        if window.lines <= self._max_per_s:
            return True
        window.suppressed += 1
        self._num_suppressed += 1
        return False

    def take_suppressed(self, now: float) -> list[tuple[str, int]]:
        """Return the events with suppressed lines whose window is over, and forget the counts."""
        if not self._num_suppressed:
            return []
        over = [
            (name, window)
            for name, window in self._windows.items()
            if window.suppressed and now - window.start_s >= _WINDOW_S
        ]
        counts = [(name, window.suppressed) for name, window in over]
        for _, window in over:
            self._num_suppressed -= window.suppressed
            window.suppressed = 0
        return counts

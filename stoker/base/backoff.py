"""RestartBackoff: how long to wait before a process that exited is started again. It has no clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackoffLimits:
    first_s: float = 0.1
    longest_s: float = 30.0
    longest_ready_s: float = 5.0  # the same for a process that has been ready since its last start
    healthy_s: float = 10.0  # the pause is reset after the process was ready for this time


class RestartBackoff:
    """The pauses of one process. They double with each exit, until the process has been healthy.

    A process that gets ready each time is useful between its exits, so it never waits for the longest pause.
    """

    def __init__(self, limits: BackoffLimits) -> None:
        self._limits = limits
        self._pause_s = limits.first_s

    def pause_s(self, ready_s: float | None) -> float:
        """Return the pause after an exit. `ready_s` is how long the process had been ready, None if it never was."""
        limits = self._limits
        if ready_s is not None and ready_s >= limits.healthy_s:
            self._pause_s = limits.first_s
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, limits.longest_s)
        return pause_s if ready_s is None else min(pause_s, max(limits.first_s, limits.longest_ready_s))

"""Time as an object. Pure cores take the time as an argument; their owners read it here."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a clock that never goes back, the same for all processes of this machine."""


class RealClock:
    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that moves when told to: tests and the simulator."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds

"""Clocks. Pure classes take the time as an argument; the code that owns them reads it from a clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of the current time."""

    def now(self) -> float:
        """Return seconds on a monotonic clock that all processes of this machine share."""


class RealClock:
    """The system's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that only moves when `advance` is called, for tests and the simulator."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds

"""ThreadTuner: how many CPU threads a step should use, found by measuring.

Two threads are nearly twice as fast on a quiet machine, and half as fast as one when something else keeps a core busy:
whoever waits at a barrier then waits for a thread that is not running. Which of the two it is changes by the minute, so
the losing choice is tried again now and then. Pure: seconds are handed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

# Of so many steps of one size, one tries another thread count. A wrong choice then costs a few percent of the time.
_PROBE_EVERY = 40
_WEIGHT = 0.3  # of the newest measurement


class Threads(Protocol):
    def choose(self, num_tokens: int) -> int:
        """For a step of so many tokens."""

    def note(self, num_tokens: int, threads: int, seconds: float) -> None:
        """How long it took with them."""


class FixedThreads:
    """What the operator said, or a device on which CPU threads do not matter."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def choose(self, num_tokens: int) -> int:
        return self._threads

    def note(self, num_tokens: int, threads: int, seconds: float) -> None:
        pass


@dataclass(slots=True)
class _Size:
    """Steps of about one size."""

    seconds: dict[int, float] = field(default_factory=dict)  # by thread count, smoothed
    steps: int = 0


class ThreadTuner:
    def __init__(self, max_threads: int) -> None:
        # Between one and all lies too little to be worth the probing.
        self._choices = sorted({1, max_threads}, reverse=True)
        self._sizes: dict[int, _Size] = {}

    def choose(self, num_tokens: int) -> int:
        size = self._sizes.setdefault(num_tokens.bit_length(), _Size())
        for threads in self._choices:
            if threads not in size.seconds:
                return threads
        best = min(self._choices, key=size.seconds.__getitem__)
        size.steps += 1
        if len(self._choices) > 1 and size.steps % _PROBE_EVERY == 0:
            return next(threads for threads in self._choices if threads != best)
        return best

    def note(self, num_tokens: int, threads: int, seconds: float) -> None:
        measured = self._sizes.setdefault(num_tokens.bit_length(), _Size()).seconds
        last = measured.get(threads, seconds)
        measured[threads] = last + _WEIGHT * (seconds - last)

"""ThreadTuner: how many CPU threads a step should use, found by measuring.

Two threads are nearly twice as fast on a quiet machine, and half as fast as one when something else keeps a core busy:
whoever waits at a barrier then waits for a thread that is not running. Which of the two it is changes by the minute, so
the losing choice is tried again now and then. Pure: seconds are handed in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

# After so many steps of one size the other thread count is tried for one; ever more rarely while it loses.
_FIRST_TRY, _LONGEST_WAIT = 8, 128
_STEPS_REMEMBERED = 5
# A step costs about as much as this many tokens before its first: makes steps of one size class comparable.
_FIXED_TOKENS = 12


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
    """Steps of about one size. Disturbances only ever add time, so a count is judged by the best of its last few steps."""

    costs: dict[int, deque[float]] = field(default_factory=dict)  # by thread count
    wait: int = _FIRST_TRY
    steps_left: int = _FIRST_TRY


class ThreadTuner:
    def __init__(self, max_threads: int) -> None:
        # Between one and all lies too little to be worth the trying.
        self._choices = (max_threads, 1) if max_threads > 1 else (1,)
        self._sizes: dict[int, _Size] = {}

    def choose(self, num_tokens: int) -> int:
        size = self._size(num_tokens)
        best = self._best(size)
        size.steps_left -= 1
        if size.steps_left > 0 or len(self._choices) == 1:
            return best
        return next(threads for threads in self._choices if threads != best)

    def note(self, num_tokens: int, threads: int, seconds: float) -> None:
        size = self._size(num_tokens)
        best = self._best(size)
        costs = size.costs.setdefault(threads, deque(maxlen=_STEPS_REMEMBERED))
        costs.append(seconds / (_FIXED_TOKENS + num_tokens))
        if self._best(size) != best:
            size.wait = size.steps_left = _FIRST_TRY  # things have changed, and may change again
        elif size.steps_left <= 0:
            size.wait = size.steps_left = min(2 * size.wait, _LONGEST_WAIT)

    def _best(self, size: _Size) -> int:
        """All cores until something better was measured."""
        return min(self._choices, key=lambda threads: min(size.costs.get(threads, (inf,))))

    def _size(self, num_tokens: int) -> _Size:
        return self._sizes.setdefault(num_tokens.bit_length(), _Size())

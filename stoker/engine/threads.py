"""ThreadTuner: how many CPU threads a step should use, found by measuring.

Two threads are nearly twice as fast on a quiet machine, and half as fast as one when something else keeps a core busy:
whoever waits at a barrier then waits for a thread that is not running. Which of the two it is changes by the minute, so
the losing choice is tried again now and then. Pure: seconds are handed in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

# After so many steps of one size, the other thread count is tried for a few. A wrong one costs a few percent of the time.
_STEPS_BETWEEN = 60
_STEPS_TRIED = 2
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
    steps_left: int = _STEPS_BETWEEN


class ThreadTuner:
    def __init__(self, max_threads: int) -> None:
        # Between one and all lies too little to be worth the trying.
        self._choices = sorted({1, max_threads}, reverse=True)
        self._sizes: dict[int, _Size] = {}

    def choose(self, num_tokens: int) -> int:
        size = self._size(num_tokens)
        for threads in self._choices:
            if len(size.costs.get(threads, ())) < _STEPS_TRIED:
                return threads
        best = min(self._choices, key=lambda threads: min(size.costs[threads]))
        size.steps_left -= 1
        if size.steps_left < 0:
            if size.steps_left <= -_STEPS_TRIED:
                size.steps_left = _STEPS_BETWEEN
            return next((threads for threads in self._choices if threads != best), best)
        return best

    def note(self, num_tokens: int, threads: int, seconds: float) -> None:
        costs = self._size(num_tokens).costs.setdefault(threads, deque(maxlen=_STEPS_REMEMBERED))
        costs.append(seconds / (_FIXED_TOKENS + num_tokens))

    def _size(self, num_tokens: int) -> _Size:
        return self._sizes.setdefault(num_tokens.bit_length(), _Size())

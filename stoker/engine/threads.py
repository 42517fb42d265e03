"""ThreadTuner: measures how many CPU threads a step should use.

Two threads are nearly twice as fast as one on an idle machine. They are slower than one when another process keeps a
core busy, because one thread then waits at each barrier for a thread that does not run. The better choice changes from
minute to minute, so the worse one is tried again now and then. Pure: durations are arguments.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

# The other thread count is tried for one step after this many steps of a size class. The interval doubles, up to the
# longest one, while the other count stays slower.
_FIRST_INTERVAL, _LONGEST_INTERVAL = 8, 128
_STEPS_REMEMBERED = 5
# The fixed cost of a step, in tokens. It makes steps of one size class comparable.
_FIXED_TOKENS = 12


class Threads(Protocol):
    """Chooses the number of CPU threads for each step."""

    def choose(self, num_tokens: int) -> int:
        """Return the number of threads for a step of `num_tokens` tokens."""

    def record(self, num_tokens: int, threads: int, seconds: float) -> None:
        """Record how long a step took."""


class FixedThreads:
    """A fixed number of threads: set by the operator, or for a device on which CPU threads hardly matter."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def choose(self, num_tokens: int) -> int:
        return self._threads

    def record(self, num_tokens: int, threads: int, seconds: float) -> None:
        pass


@dataclass(slots=True)
class _SizeClass:
    """Steps of similar size. Noise only adds time, so a thread count is judged by the best of its last few steps."""

    costs: dict[int, deque[float]] = field(default_factory=dict)  # seconds per token, by thread count
    interval: int = _FIRST_INTERVAL
    steps_left: int = _FIRST_INTERVAL


class ThreadTuner:
    """Compares one thread with all cores. Counts in between differ too little to be worth trying."""

    def __init__(self, max_threads: int) -> None:
        self._choices = (max_threads, 1) if max_threads > 1 else (1,)
        self._size_classes: dict[int, _SizeClass] = {}

    def choose(self, num_tokens: int) -> int:
        size = self._size_class(num_tokens)
        best = self._best(size)
        size.steps_left -= 1
        if size.steps_left > 0 or len(self._choices) == 1:
            return best
        return next(threads for threads in self._choices if threads != best)

    def record(self, num_tokens: int, threads: int, seconds: float) -> None:
        size = self._size_class(num_tokens)
        best = self._best(size)
        costs = size.costs.setdefault(threads, deque(maxlen=_STEPS_REMEMBERED))
        costs.append(seconds / (_FIXED_TOKENS + num_tokens))
        if self._best(size) != best:
            size.interval = size.steps_left = _FIRST_INTERVAL  # conditions changed, and may change again soon
        elif size.steps_left <= 0:
            size.interval = size.steps_left = min(2 * size.interval, _LONGEST_INTERVAL)

    def _best(self, size: _SizeClass) -> int:
        """Return the fastest measured count; all cores if nothing was measured."""
        return min(self._choices, key=lambda threads: min(size.costs.get(threads, (inf,))))

    def _size_class(self, num_tokens: int) -> _SizeClass:
        return self._size_classes.setdefault(num_tokens.bit_length(), _SizeClass())

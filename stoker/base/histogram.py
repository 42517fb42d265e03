"""A histogram that is cheap to add to: values are stored as they come and sorted into buckets many at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from math import inf

_MAX_PENDING = 1024  # values that wait to be counted


class Histogram:
    """Counts values by buckets, as Prometheus does: a value on a bound belongs to the bucket that ends there."""

    __slots__ = ("_counts", "_pending", "_sum", "bounds")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._pending: list[float] = []

    def observe(self, value: float) -> None:
        pending = self._pending
        pending.append(value)
        if len(pending) >= _MAX_PENDING:
            self._count()

    def observe_all(self, values: Iterable[float]) -> None:
        self._pending.extend(values)
        self._count()

    def cumulative(self) -> list[int]:
        """Return for each bound how many values are not above it. The last entry is the number of all values."""
        self._count()
        return list(accumulate(self._counts))

    @property
    def sum(self) -> float:
        self._count()
        return self._sum

    def _count(self) -> None:
        pending = self._pending
        self._sum += sum(pending)
        pending.sort()
        below = 0
        for bucket, bound in enumerate((*self.bounds, inf)):
            up_to = bisect_right(pending, bound)
            self._counts[bucket] += up_to - below
            below = up_to
        pending.clear()

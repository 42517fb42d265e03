"""SeriesBook: sums over time in rings of fixed size, at several resolutions. Pure: the time is an argument.

A point is a row of numbers that can be added, such as counts and seconds. So a point of a coarse ring is the sum of the fine
ones, points of several processes can be joined, and percentiles come from summed histograms. A gauge is a sum too: divided by
the number of ticks in the point, it is the mean.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resolution:
    """One ring: the seconds of a point, and how many points are kept."""

    step_s: int
    num_points: int


# 10 minutes, 3 hours and 3 days
RESOLUTIONS = (Resolution(1, 600), Resolution(10, 1080), Resolution(300, 864))


class SeriesRing:
    """The latest points of one resolution. A point is made when something is added to it."""

    def __init__(self, resolution: Resolution, width: int) -> None:
        self.step_s = resolution.step_s
        self.num_points = resolution.num_points
        self._width = width
        self._rows: list[array[float] | None] = [None] * self.num_points
        self._numbers = [-1] * self.num_points  # which point each row holds: its start divided by the step
        self._newest = -1

    def add(self, time_s: float, row: Sequence[float]) -> None:
        """Add to the point of this time. Time that goes back is counted in the newest point."""
        number = self._newest = max(int(time_s // self.step_s), self._newest)
        at = number % self.num_points
        known = self._rows[at]
        if known is None or self._numbers[at] != number:
            self._rows[at] = array("d", row)
            self._numbers[at] = number
        else:
            for i, value in enumerate(row):
                if value:
                    known[i] += value

    def window(self, end_s: float, count: int) -> list[tuple[float, array[float] | None]]:
        """Return the `count` points up to the one of `end_s`, oldest first, as (start, row). None: nothing was added."""
        last = int(end_s // self.step_s)
        count = max(0, min(count, self.num_points))
        points: list[tuple[float, array[float] | None]] = []
        for number in range(last - count + 1, last + 1):
            at = number % self.num_points
            is_kept = number >= 0 and self._numbers[at] == number
            points.append((float(number * self.step_s), self._rows[at] if is_kept else None))
        return points

    def total(self, end_s: float, count: int) -> list[float]:
        """Return the sum of the points of a window."""
        sums = [0.0] * self._width
        for _, row in self.window(end_s, count):
            if row is not None:
                for i, value in enumerate(row):
                    sums[i] += value
        return sums


class SeriesBook:
    """The rings of all resolutions. `tick` gets totals since the start, and stores what was added since the last tick."""

    def __init__(self, num_totals: int, num_gauges: int, resolutions: Sequence[Resolution] = RESOLUTIONS) -> None:
        self.width = num_totals + num_gauges + 1
        self._num_totals = num_totals
        self._last: Sequence[float] = [0.0] * num_totals
        self._rings = {one.step_s: SeriesRing(one, self.width) for one in resolutions}

    @property
    def steps_s(self) -> list[int]:
        return list(self._rings)

    def ring(self, step_s: int) -> SeriesRing:
        """Return the ring of a resolution. Raises KeyError if there is none."""
        return self._rings[step_s]

    def tick(self, time_s: float, totals: Sequence[float], gauges: Sequence[float]) -> None:
        """Store the growth of the totals, and the gauges. The last number of a row counts the ticks."""
        row = [now - before for now, before in zip(totals, self._last, strict=True)]
        self._last = list(totals)
        row += gauges
        row.append(1.0)
        if len(row) != self.width:
            raise ValueError(f"a row has {len(row)} numbers instead of {self.width}")
        for ring in self._rings.values():
            ring.add(time_s, row)


def quantile(bounds: Sequence[float], cumulative: Sequence[float], share: float) -> float | None:
    """Return a quantile of a histogram, interpolated in its bucket. None: it is empty.

    `cumulative` has one entry more than `bounds`. Values above the last bound count as the last bound.
    """
    rank = share * cumulative[-1]
    if rank <= 0:
        return None
    low, below = 0.0, 0.0
    for bound, count in zip(bounds, cumulative, strict=False):
        if count >= rank:
            return low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return float(bounds[-1])

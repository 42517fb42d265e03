"""SeriesRows: rows of the series as one process of a gateway gives them to another one, which joins them."""

from __future__ import annotations

import msgspec


class SeriesRows(msgspec.Struct, frozen=True, kw_only=True):
    """Points of one process, oldest first. A row is None where nothing was added.

    Processes tick at the same moments but may have other clocks, so that points are matched from the end.
    """

    time_s: float
    step_s: int
    times_s: list[float]
    rows: list[list[float] | None]

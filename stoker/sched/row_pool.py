"""RowPool: which rows of the device are free. Pure."""

from __future__ import annotations

from collections import deque

from stoker.base.ids import Row


class RowPool:
    """The rows that no sequence has.

    In a pipeline, a launched step may still sample for a row that its sequence gave back. Such a row *cools*: it is free
    after the plans that were launched before it was given back are committed.
    """

    def __init__(self, max_rows: int, stages: int) -> None:
        self._is_pipeline = stages > 1
        self._free = [Row(row) for row in reversed(range(max_rows))]
        self._freed: list[Row] = []  # passed to the runner with the next plan
        self._cooling: deque[tuple[int, Row]] = deque()  # with the number of plans that must be committed first
        self._num_plans = self._num_commits = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cooling(self) -> int:
        return len(self._cooling)

    def take(self) -> Row:
        return self._free.pop()

    def give_back(self, row: Row) -> None:
        if self._is_pipeline and self._num_plans != self._num_commits:
            self._cooling.append((self._num_plans, row))
        else:
            self._free_row(row)

    def take_freed(self) -> list[Row]:
        """Return the rows that became free since the last call."""
        freed, self._freed = self._freed, []
        return freed

    def plan_launched(self) -> None:
        """Record that another plan was launched."""
        self._num_plans += 1

    def plan_committed(self) -> None:
        """Record that the oldest launched plan was committed."""
        self._num_commits += 1
        while self._cooling and self._cooling[0][0] <= self._num_commits:
            self._free_row(self._cooling.popleft()[1])

    def _free_row(self, row: Row) -> None:
        self._free.append(row)
        self._freed.append(row)

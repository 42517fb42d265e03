"""StartProgress: what a rank tells rank 0 with its heartbeats while it loads its part of the model.

Heartbeats come from a thread of their own. So they go on while the main thread waits for a drive that never answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stoker.parallel.rank_link import WAITS_FOR_RANKS


class StartProgress:
    """Counts the parts of the model that were loaded. While the rank waits for other ranks, it cannot get further."""

    def __init__(self) -> None:
        self._count = 0
        self._is_waiting = True

    @property
    def value(self) -> int:
        """The number that the next heartbeat carries."""
        return WAITS_FOR_RANKS if self._is_waiting else self._count

    def advance(self, stage: str, done: int, total: int) -> None:
        """Count one more part. The arguments are those of `build_part`."""
        self._count += 1

    @contextmanager
    def working(self, works: bool = True) -> Iterator[None]:
        """Say for a block that this rank loads, or that it waits for other ranks."""
        before, self._is_waiting = self._is_waiting, not works
        try:
            yield
        finally:
            self._is_waiting = before
            self._count += 1

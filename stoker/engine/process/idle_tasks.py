"""QuietTime: what would disturb a request is done while there is none."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chore:
    after_s: float  # without a request
    run: Callable[[], bool | None]  # a part of it; whether more is left


class QuietTime:
    """One chore after the other, part by part: a request that comes waits for the end of a part at most, and the rest waits
    until it is quiet again."""

    def __init__(self, chores: Sequence[Chore]) -> None:
        self._left = deque(chores)
        self._is_under_way = False

    @property
    def wait_s(self) -> float | None:
        """How long it has to be quiet from now on; None: nothing is left to be done."""
        if not self._left:
            return None
        return 0.0 if self._is_under_way else self._left[0].after_s

    def disturbed(self) -> None:
        self._is_under_way = False

    def use(self) -> None:
        """It was quiet for `wait_s`."""
        self._is_under_way = bool(self._left[0].run())
        if not self._is_under_way:
            self._left.popleft()

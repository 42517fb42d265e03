"""IdleTasks: work that would delay a request is done while there is none."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IdleTask:
    after_s: float  # idle time before the task starts
    run: Callable[[], bool | None]  # does one part of the task; returns True if more is left


class IdleTasks:
    """Runs tasks one after the other, in short parts.

    A new request waits at most for the end of one part. The rest waits until the engine has been idle again.
    """

    def __init__(self, tasks: Sequence[IdleTask]) -> None:
        self._left = deque(tasks)
        self._is_running = False

    @property
    def wait_s(self) -> float | None:
        """How long the engine must be idle, from now on, before `run_next`. None if no task is left."""
        if not self._left:
            return None
        return 0.0 if self._is_running else self._left[0].after_s

    def interrupt(self) -> None:
        """A request arrived: the next part has to wait again."""
        self._is_running = False

    def run_next(self) -> None:
        """Run the next part. Call it after `wait_s` without a request."""
        self._is_running = bool(self._left[0].run())
        if not self._is_running:
            self._left.popleft()

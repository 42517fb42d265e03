"""Tasks that run as long as their process. An unexpected error must not end one silently: what it keeps up to date would get old.

Such an error is a defect. It is logged with its traceback and counted, and the task goes on after a pause.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import NoReturn

from stoker.base.log import EventLog

_PAUSE_S = (1.0, 60.0)  # after the first error, and the longest

log = EventLog("tasks")


class TaskErrors:
    """Counts the unexpected errors of tasks, by the task's name."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def note(self, task: str, error: BaseException) -> None:
        self.counts[task] += 1
        log.error("task_failed", exc_info=error, task=task, count=self.counts[task])


async def repeat(task: str, turn: Callable[[], Awaitable[object]], errors: TaskErrors) -> NoReturn:
    """Run `turn` again and again. It waits by itself; after an error there is a pause, which grows while errors follow."""
    pause_s, most_s = _PAUSE_S
    while True:
        try:
            await turn()
            pause_s = _PAUSE_S[0]
        except Exception as error:
            errors.note(task, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, most_s)

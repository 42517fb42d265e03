"""DiskLookups: questions to a disk that may not answer, asked on a thread of ours, so that whoever waits can give up.

A network drive that is away, or a disk that tries a sector again and again, keeps a system call for minutes, and nobody can take
it back. So one thread may be kept by it, and no more: until its call has come back, nobody asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from stoker.kv.blocks.transfer import TierUnavailable
from stoker.kv.store.tiers.disk.disk_directory import DiskHealth

T = TypeVar("T")

_PARTS = 4  # of the time to wait: a machine that stands still, and not the disk, uses up one of them


class DiskLookups:
    def __init__(self, health: DiskHealth) -> None:
        self._health = health
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # A daemon: a call that hangs must not keep the process.
        threading.Thread(target=self._work, name="kv-disk-ask", daemon=True).start()

    def ask(self, question: Callable[[], T], deadline_s: float) -> T:
        """TierUnavailable: it was not answered in time, or one before it has not come back yet."""
        self._health.check_answers()
        answer: Future[T] = Future()

        def job() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(question())
            except Exception as error:  # whoever waits for it answers for it
                answer.set_exception(error)

        self._jobs.put(job)
        for _ in range(_PARTS):
            try:
                return answer.result(deadline_s / _PARTS)
            except TimeoutError:
                if answer.done():  # its own: a network drive may say so, too
                    raise
        if not answer.cancel():  # else it was not even asked: the one before it hangs, and whoever asked that says so
            self._health.hangs(answer, deadline_s)
        raise TierUnavailable(f"the disk did not answer within {deadline_s:g} s")

    def close(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

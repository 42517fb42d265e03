"""DiskLookups: disk calls that may hang, made on a thread of their own, so that a caller can stop waiting.

An unreachable network drive, or a disk that retries a bad sector, blocks a system call for minutes, and the call cannot
be interrupted. At most one thread is blocked by it: until its call returns, no further calls are made.
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

_PARTS = 4  # the wait is split: if the machine stalls, and not the disk, only one of the parts is lost


class DiskLookups:
    """Runs calls one after the other on one thread."""

    def __init__(self, health: DiskHealth) -> None:
        self._health = health
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # A daemon thread: a call that hangs must not keep the process alive.
        threading.Thread(target=self._work, name="kv-disk-lookup", daemon=True).start()

    def run(self, call: Callable[[], T], deadline_s: float) -> T:
        """Run `call` and return its result. Raises TierUnavailable if it does not return in time, or an earlier call
        still hangs."""
        self._health.check_answers()
        result: Future[T] = Future()

        def job() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                result.set_result(call())
            except Exception as error:  # the waiting caller raises it
                result.set_exception(error)

        self._jobs.put(job)
        for _ in range(_PARTS):
            try:
                return result.result(deadline_s / _PARTS)
            except TimeoutError:
                if result.done():  # the call's own error: a network drive may raise TimeoutError too
                    raise
        # otherwise the call was not even started: the earlier call hangs, and its caller reports that
        if not result.cancel():
            self._health.hangs(result, deadline_s)
        raise TierUnavailable(f"the disk did not answer within {deadline_s:g} s")

    def close(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

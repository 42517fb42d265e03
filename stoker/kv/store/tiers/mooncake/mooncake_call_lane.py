"""CallLane: a few threads for one kind of call to the Mooncake client, so that a caller can stop waiting for a call."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from stoker.kv.blocks.transfer import TierUnavailable

T = TypeVar("T")

_PENDING_PER_THREAD = 4


class CallLane:
    """Runs calls on `num_threads` daemon threads, because a call that hangs must not keep the process alive.

    Calls that move bytes poll until the last byte has arrived. They get a higher `nice` value, so that the client's own
    threads, which move the bytes, do not wait for a core that is busy with polling.
    """

    def __init__(self, name: str, num_threads: int, nice: int = 0) -> None:
        self._name = name
        self._nice = nice
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._max_pending = num_threads * _PENDING_PER_THREAD
        self._pending = 0
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, name=f"mooncake-{name}-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue a call. Raises TierUnavailable if too many wait."""
        with self._lock:
            if self._pending >= self._max_pending:
                raise TierUnavailable(f"Mooncake: {self._pending} calls already wait in the {self._name} lane")
            self._pending += 1
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(work())
            except Exception as error:  # the waiting caller raises it
                future.set_exception(error)

        self._jobs.put(job)
        return future

    def stop(self, deadline: float) -> bool:
        """Let the threads end, and return whether all calls have ended by the deadline (monotonic)."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + self._nice)
        while (job := self._jobs.get()) is not None:
            job()
            del job  # drop the reference to the client too
            with self._lock:
                self._pending -= 1

"""The store for code on the event loop: transactions run on threads, with a bound and a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from stoker.base.errors import Overloaded
from stoker.gateway.store.store import Store, StoreUnavailable, Transaction

T = TypeVar("T")

_NUM_THREADS = 4
_MAX_RUNNING = 256
_TIMEOUT_S = 10.0


class StoreThreads:
    """Runs functions of a transaction on a few threads. Those that read have their own, so they wait for no writer.

    If the deadline passes or the caller is cancelled, the function may still run to its end, and a write may be committed. So a
    write must be idempotent if it may be repeated.
    """

    def __init__(self, store: Store, num_threads: int = _NUM_THREADS, max_running: int = _MAX_RUNNING) -> None:
        self.store = store
        self._writers = ThreadPoolExecutor(num_threads, thread_name_prefix="store-writer")
        self._readers = ThreadPoolExecutor(num_threads, thread_name_prefix="store-reader")
        self._max_running = max_running
        self._num_running = 0  # functions that run or wait for a thread

    async def write(self, work: Callable[[Transaction], T], timeout_s: float = _TIMEOUT_S) -> T:
        """Run `work` in a transaction. It is committed, and on disk, when this returns.

        Raises StoreUnavailable, StoreRefused, or Overloaded if too much waits for the store.
        """

        def run() -> T:
            with self.store.transaction() as changes:
                return work(changes)

        return await self._run(self._writers, run, timeout_s)

    async def read(self, work: Callable[[Transaction], T], timeout_s: float = _TIMEOUT_S) -> T:
        """Run `work` on a consistent state. Raises StoreUnavailable, StoreTimeout, or Overloaded."""

        def run() -> T:
            with self.store.snapshot(timeout_s) as reader:
                return work(reader)

        return await self._run(self._readers, run, timeout_s + 1.0)  # the store itself stops a long query

    def close(self) -> None:
        """End the threads when their work is done."""
        for threads in (self._writers, self._readers):
            threads.shutdown(wait=True, cancel_futures=True)

    async def _run(self, threads: ThreadPoolExecutor, run: Callable[[], T], timeout_s: float) -> T:
        if self._num_running >= self._max_running:
            message = f"{self._num_running} queries wait for the store, which is the limit; retry later."
            raise Overloaded(message, code="store_busy")
        self._num_running += 1
        future = asyncio.get_running_loop().run_in_executor(threads, run)
        future.add_done_callback(self._ended)
        try:
            async with asyncio.timeout(timeout_s):  # not `wait_for`, which loses a cancellation in Python 3.11
                return await asyncio.shield(future)
        except TimeoutError:
            raise StoreUnavailable(f"store={self.store.name}: no answer within {timeout_s:g} s") from None

    def _ended(self, future: asyncio.Future[T]) -> None:
        self._num_running -= 1
        if not future.cancelled():
            future.exception()  # the caller may have left, and asyncio would log the exception as never retrieved

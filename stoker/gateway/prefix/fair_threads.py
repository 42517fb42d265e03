"""A few threads for work that would block the event loop. Tenants take turns, by the size of their jobs.

A tenant runs at most `per_tenant` jobs at a time, so its long jobs leave threads for other tenants. Its other jobs wait, up
to `max_waiting` of them. A job whose caller is cancelled before it began never runs.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Job:
    tenant: str
    cost: float
    work: Callable[[], Any]
    result: asyncio.Future[Any]


class FairThreads:
    """Runs jobs on threads, in a fair order. All methods belong to the event loop's thread."""

    def __init__(self, num_threads: int = 4, per_tenant: int = 2, max_waiting: int = 16) -> None:
        self._num_threads = num_threads
        self._per_tenant = per_tenant
        self._max_waiting = max_waiting
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="conversation")
        self._waiting: dict[str, deque[_Job]] = {}
        self._running: Counter[str] = Counter()
        self._num_running = 0
        self._finish: dict[str, float] = {}  # tenant -> virtual finish time of its last job that began
        self._virtual = 0.0

    def has_room(self, tenant: str) -> bool:
        """Return False if the tenant has the maximum of waiting jobs."""
        return len(self._waiting.get(tenant, ())) < self._max_waiting

    async def run(self, tenant: str, cost: float, work: Callable[[], T]) -> T:
        """Run `work` on a thread and return its result. `cost` is the size of the job, in any unit."""
        loop = asyncio.get_running_loop()
        job = _Job(tenant, cost, work, loop.create_future())
        self._waiting.setdefault(tenant, deque()).append(job)
        self._start(loop)
        try:
            result: T = await job.result
            return result
        finally:
            line = self._waiting.get(tenant)
            if line is not None and job in line:  # cancelled before it began
                line.remove(job)
                if not line:
                    del self._waiting[tenant]

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._num_running < self._num_threads and (job := self._next()) is not None:
            self._num_running += 1
            self._running[job.tenant] += 1
            running = self._threads.submit(job.work)
            running.add_done_callback(lambda done, job=job: _call(loop, self._ended, loop, job, done))  # type: ignore[misc]

    def _next(self) -> _Job | None:
        """Take the first job of the tenant whose turn it is."""
        ready = [tenant for tenant in self._waiting if self._running[tenant] < self._per_tenant]
        if not ready:
            return None
        tenant = min(ready, key=lambda one: self._finish.get(one, 0.0))
        line = self._waiting[tenant]
        job = line.popleft()
        if not line:
            del self._waiting[tenant]
        self._virtual = max(self._virtual, self._finish.get(tenant, 0.0))
        self._finish[tenant] = self._virtual + job.cost
        return job

    def _ended(self, loop: asyncio.AbstractEventLoop, job: _Job, done: Future[Any]) -> None:
        self._num_running -= 1
        self._running[job.tenant] -= 1
        if not self._running[job.tenant]:
            del self._running[job.tenant]
        if not self._num_running and not self._waiting:
            self._finish.clear()  # idle: every tenant starts equal
            self._virtual = 0.0
        if not job.result.done():
            error = None if done.cancelled() else done.exception()
            if done.cancelled():
                job.result.cancel()
            elif error is not None:
                job.result.set_exception(error)
            else:
                job.result.set_result(done.result())
        self._start(loop)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *args)

"""Fair queue of grammar compilations: no tenant's grammars delay another tenant's.

A slot is a thread that compiles. A tenant that compiles nothing gets a slot before tenants that already have one, and the last
free slot is kept for such a tenant. So one tenant never has all slots, whatever it sends.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

J = TypeVar("J")


class FairSlots(Generic[J]):
    """Decides which waiting job gets a slot next. Pure, not thread-safe."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._waiting: OrderedDict[str, deque[J]] = OrderedDict()  # by tenant; the one served last stands last
        self._running: Counter[str] = Counter()

    def put(self, tenant: str, job: J) -> None:
        """Add a job to the end of its tenant's queue."""
        self._waiting.setdefault(tenant, deque()).append(job)

    def take(self) -> tuple[str, J] | None:
        """Give a slot to the next job, and return its tenant and the job. None: no job may start now."""
        num_free = self._num_slots - self._running.total()
        if num_free <= 0:
            return None
        tenant = min(
            self._waiting, key=self._running.__getitem__, default=None
        )  # the first of equals: served least recently
        if tenant is None or (self._running[tenant] and num_free == 1):
            return None
        jobs = self._waiting.pop(tenant)
        job = jobs.popleft()
        if jobs:
            self._waiting[tenant] = jobs
        self._running[tenant] += 1
        return tenant, job

    def done(self, tenant: str) -> None:
        """Return the slot of a job of this tenant."""
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]


class CompileJob(Future[None]):
    """One compilation. Several tenants may wait for it; it runs once."""

    def __init__(self, call: Callable[[CompileJob], None]) -> None:
        super().__init__()
        self._call = call
        self.is_urgent = False  # an interactive request waits for it

    def begin(self) -> bool:
        """Return True if it must run now. False: it runs already, or it was cancelled."""
        return not self.running() and not self.done() and self.set_running_or_notify_cancel()

    def run(self) -> None:
        try:
            self._call(self)
        except BaseException as error:
            self.set_exception(error)
            raise
        self.set_result(None)


class FairCompilers:
    """Threads that compile grammars in the order of FairSlots. Its methods can be called from any thread."""

    def __init__(self, num_threads: int, on_start: Callable[[], None]) -> None:
        self._on_start = on_start
        self._changed = threading.Condition()
        self._slots: FairSlots[CompileJob] = FairSlots(num_threads)
        for number in range(num_threads):
            threading.Thread(target=self._run, name=f"grammar-{number}", daemon=True).start()

    def submit(self, tenant: str, job: CompileJob) -> None:
        """Queue a job for a tenant. A job that another tenant waits for, too, runs at the earlier of their turns."""
        with self._changed:
            self._slots.put(tenant, job)
            self._changed.notify()

    def _run(self) -> None:
        self._on_start()
        while True:
            with self._changed:
                while (taken := self._slots.take()) is None:
                    self._changed.wait()
                tenant, job = taken
                must_run = job.begin()
            try:
                if must_run:
                    job.run()
            finally:
                with self._changed:
                    self._slots.done(tenant)
                    self._changed.notify_all()

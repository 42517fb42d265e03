"""A store that remembers whether it works, for health checks, metrics and the log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stoker.base.log import EventLog
from stoker.gateway.store.store import Store, StoreUnavailable, Tables, Transaction

_LOG_S = 60.0  # how often a store that stays away is logged again

log = EventLog("store")


class WatchedStore:
    """Passes everything on to `store`. `trouble` is the reason of the last failure, None after a success."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._failed_s: float | None = None
        self._logged_s = 0.0
        self.trouble: str | None = None
        self.num_failures = 0

    @property
    def name(self) -> str:
        return self._store.name

    def declare(self, tables: Tables) -> None:
        self._store.declare(tables)

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        with self._noted(), self._store.transaction() as changes:
            yield changes

    @contextmanager
    def snapshot(self, limit_s: float = 30.0) -> Iterator[Transaction]:
        with self._noted(), self._store.snapshot(limit_s) as reader:
            yield reader

    def close(self) -> None:
        self._store.close()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except StoreUnavailable as error:
            now = self._clock()
            self.num_failures += 1
            self.trouble = error.detail
            if self._failed_s is None:
                self._failed_s = now
            if now - self._logged_s > _LOG_S or not self._logged_s:
                self._logged_s = now
                log.error("store_unavailable", reason=error.detail, since_s=round(now - self._failed_s, 1))
            raise
        if self.trouble is not None:
            since_s = self._clock() - (self._failed_s or 0.0)
            self.trouble, self._failed_s, self._logged_s = None, None, 0.0
            log.warning("store_available", after_s=round(since_s, 1))

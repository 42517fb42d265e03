"""A worker's coming and going, for all who keep something about workers: fleet, watchers, connections, reservations, prefix
indexes. One object tells them all, so that nothing of a worker that left stays behind."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace

from stoker.base.ids import WorkerId
from stoker.base.log import EventLog
from stoker.fleet.fleet import Fleet
from stoker.fleet.load_book import LoadBook
from stoker.fleet.spec import WorkerSpec
from stoker.gateway.path.dialects.dialect import DIALECTS
from stoker.gateway.path.upstream import Upstreams
from stoker.gateway.watch.watchers import Watchers

_SILENT_S = 20.0  # three heartbeats that were not heard; who is gone is seen sooner, by its watcher
_LOOK_S = 1.0

log = EventLog("workers")


class Workers:
    def __init__(
        self,
        fleet: Fleet,
        load_book: LoadBook,
        watchers: Watchers,
        upstreams: Upstreams,
        clock: Callable[[], float],
        silent_s: float = _SILENT_S,
    ) -> None:
        self._fleet = fleet
        self._load_book = load_book
        self._watchers = watchers
        self._upstreams = upstreams
        self._clock = clock
        self._silent_s = silent_s
        self._leaving: set[asyncio.Task[None]] = set()
        self._expiry: asyncio.Task[None] | None = None

    def add(self, spec: WorkerSpec) -> None:
        """A new one, or a known one again."""
        dialect = DIALECTS.get(spec.dialect)  # one that nobody can speak to is refused here, by name
        spec = replace(spec, decodes_alone=dialect.decodes_alone)
        self._watchers.start(spec)  # refuses an address that nobody could be asked at
        self._fleet.add(spec, self._clock())
        if not spec.from_config and self._expiry is None:
            self._expiry = asyncio.create_task(self._expire(), name="worker-expiry")

    def restarted(self, worker_id: WorkerId) -> None:
        """At the same address there is a new process."""
        self._watchers.restarted(worker_id)

    def remove(self, worker_id: WorkerId) -> None:
        """What runs there goes on; nothing new is sent."""
        self._fleet.remove(worker_id, self._clock())
        self._upstreams.let_go(worker_id)
        self._load_book.forget(worker_id)
        watcher = self._watchers.stop(worker_id)
        if watcher is not None:
            task = asyncio.create_task(watcher.close())
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def looked(self, timeout_s: float) -> None:
        """Until every worker has said what it serves, or was found to be away; not longer than `timeout_s`."""
        until = self._clock() + timeout_s
        while (now := self._clock()) < until:
            if all(member.models or not member.health.usable(now) for member in self._fleet.members()):
                return
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            await asyncio.gather(self._expiry, return_exceptions=True)
        await asyncio.gather(*self._leaving)
        await self._watchers.close()

    async def _expire(self) -> None:
        looked_s, deaf_until_s = self._clock(), -math.inf
        while True:
            await asyncio.sleep(min(_LOOK_S, self._silent_s / 3))
            now = self._clock()
            if now - looked_s > self._silent_s / 2:
                deaf_until_s = now  # this process stood still: what workers said meanwhile is not read yet
            looked_s = now
            if now - deaf_until_s <= self._silent_s:
                continue
            for worker_id in self._fleet.expire(now, self._silent_s):
                log.warning("worker_silent", worker=worker_id, seconds=self._silent_s)
                self._upstreams.cut(worker_id)  # it may hang; once it is forgotten, nobody looks whether it does
                self.remove(worker_id)

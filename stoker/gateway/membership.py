"""Adds workers to the gateway, and removes them together with all state about them.

The fleet, the watchers, the connections, the reservations and the prefix indexes hold state about workers. One object updates
them all, so that no state of a removed worker stays behind.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace

from stoker.base.ids import WorkerId
from stoker.base.log import EventLog
from stoker.base.long_task import TaskErrors, repeat
from stoker.fleet.fleet import Fleet
from stoker.fleet.load_book import LoadBook
from stoker.fleet.spec import WorkerSpec
from stoker.gateway.path.dialects.dialect import DIALECTS
from stoker.gateway.path.moves import Moves
from stoker.gateway.path.upstream import Upstreams
from stoker.gateway.watch.watchers import Watchers

_SILENT_S = 20.0  # three missed heartbeats; the watcher notices a dead worker sooner
_CHECK_S = 1.0  # how often heartbeats are checked

log = EventLog("workers")


class Membership:
    """Adds and removes workers, and removes registered workers whose heartbeats have stopped."""

    def __init__(
        self,
        fleet: Fleet,
        load_book: LoadBook,
        watchers: Watchers,
        upstreams: Upstreams,
        moves: Moves,
        clock: Callable[[], float],
        silent_s: float = _SILENT_S,
        errors: TaskErrors | None = None,
    ) -> None:
        self._fleet = fleet
        self._load_book = load_book
        self._watchers = watchers
        self._upstreams = upstreams
        self._moves = moves
        self._clock = clock
        self._silent_s = silent_s
        self._errors = errors or TaskErrors()
        self._checked_s, self._stalled_until_s = clock(), -math.inf
        self._leaving: set[asyncio.Task[None]] = set()
        self._expiry: asyncio.Task[None] | None = None

    def add(self, spec: WorkerSpec) -> None:
        """Add a worker, or update a known one. Raises ConfigError for an unknown dialect or an invalid URL."""
        dialect = DIALECTS.get(spec.dialect)
        spec = replace(spec, decodes_alone=dialect.decodes_alone)
        self._watchers.start(spec, dialect.load_probe)
        self._fleet.add(spec, self._clock())
        if not spec.from_config and self._expiry is None:
            self._expiry = asyncio.create_task(
                repeat("worker_expiry", self._expire, self._errors), name="worker-expiry"
            )
            self._checked_s = self._clock()

    def restarted(self, worker_id: WorkerId) -> None:
        """Note that a new process runs at the worker's address."""
        self._watchers.restarted(worker_id)

    def remove(self, worker_id: WorkerId, *, moves: bool = False) -> None:
        """Remove a worker: it gets no new requests. Its running requests continue, on other workers if `moves` is set."""
        member = self._fleet.member(worker_id)
        if member is not None and moves:
            self._moves.begin(member)
        self._fleet.remove(worker_id, self._clock())
        self._upstreams.let_go(worker_id)
        self._load_book.forget(worker_id)
        watcher = self._watchers.stop(worker_id)
        if watcher is not None:
            task = asyncio.create_task(watcher.close())
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def wait_first_polls(self, timeout_s: float) -> None:
        """Wait until the models of every worker are known or the worker is found to be down, at most `timeout_s`."""
        until = self._clock() + timeout_s
        while (now := self._clock()) < until:
            if all(member.models or not member.health.usable(now) for member in self._fleet.members()):
                return
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            await asyncio.gather(self._expiry, return_exceptions=True)
        await self._moves.close()
        await asyncio.gather(*self._leaving)
        await self._watchers.close()

    async def _expire(self) -> None:
        await asyncio.sleep(min(_CHECK_S, self._silent_s / 3))
        now = self._clock()
        if now - self._checked_s > self._silent_s / 2:
            self._stalled_until_s = now  # this process was stopped, and heartbeats sent meanwhile are not read yet
        self._checked_s = now
        if now - self._stalled_until_s <= self._silent_s:
            return
        for worker_id in self._fleet.expire(now, self._silent_s):
            log.warning("worker_silent", worker=worker_id, seconds=self._silent_s)
            self._upstreams.cut(worker_id)  # the worker may hang, and after its removal no watcher would notice
            self.remove(worker_id)

"""The watchers of all workers, started and stopped as workers join and leave the fleet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet
from stoker.fleet.load_book import LoadBook
from stoker.fleet.spec import Role, WorkerSpec
from stoker.gateway.prefix.conversation_keys import PrefixKeyMakers
from stoker.gateway.watch.load_probe import LoadProbe, NoLoadProbe
from stoker.gateway.watch.other_work import OtherWork
from stoker.gateway.watch.watcher import WatchContext, Watcher, WatchSettings
from stoker.gateway.watch.worker_signers import WorkerSigners
from stoker.gateway.watch.zmq_reader import LazyZmqContext
from stoker.proto.messages import WorkerInfo
from stoker.routing.router import PrefixIndexes

__all__ = ["WatchSettings", "Watchers"]


class Watchers:
    """One Watcher for each worker."""

    def __init__(
        self,
        fleet: Fleet,
        indexes: PrefixIndexes,
        key_makers: PrefixKeyMakers,
        settings: WatchSettings | None = None,
        *,
        signers: WorkerSigners | None = None,
        api_keys: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_lost: Callable[[WorkerId], None] = lambda worker_id: None,
        on_moving: Callable[[WorkerId], None] = lambda worker_id: None,
        on_role: Callable[[WorkerId, Role], None] = lambda worker_id, role: None,
        other_work: OtherWork | None = None,
    ) -> None:
        self._context = WatchContext(
            fleet=fleet,
            indexes=indexes,
            key_makers=key_makers,
            settings=settings or WatchSettings(),
            clock=clock,
            signers=signers or WorkerSigners(),
            on_lost=on_lost,
            on_moving=on_moving,
            on_role=on_role,
            other_work=other_work or OtherWork(LoadBook(), ""),
            zmq_context=LazyZmqContext(),
        )
        self._api_keys = api_keys or {}
        self._watchers: dict[WorkerId, Watcher] = {}

    def start(self, spec: WorkerSpec, load_probe: type[LoadProbe] = NoLoadProbe) -> None:
        """Watch a worker. If it is already watched, replace the watcher only if more of its spec than the role has changed."""
        known = self._watchers.get(spec.worker_id)
        if known is not None and replace(known.spec, role=spec.role) == spec:
            known.spec = spec
            return
        self._watchers[spec.worker_id] = Watcher(spec, self._context, load_probe(), self._api_keys.get(spec.url))
        if known is not None:
            known.end()

    def restarted(self, worker_id: WorkerId) -> None:
        """Read everything about this worker again: it is a new process."""
        watcher = self._watchers.get(worker_id)
        if watcher is not None:
            watcher.refresh()

    def info(self, worker_id: WorkerId) -> WorkerInfo | None:
        """Return the worker's latest description of itself, or None if there is none or it may be outdated."""
        watcher = self._watchers.get(worker_id)
        return None if watcher is None else watcher.info

    async def metrics_page(self, worker_id: WorkerId) -> bytes | None:
        """Return a worker's /metrics, or None if it does not answer."""
        watcher = self._watchers.get(worker_id)
        return None if watcher is None else await watcher.metrics_page()

    def stop(self, worker_id: WorkerId) -> Watcher | None:
        """Stop watching a worker that left the fleet. The caller must close the returned watcher."""
        watcher = self._watchers.pop(worker_id, None)
        if watcher is not None:
            watcher.end()
            self._context.signers.forget(watcher.spec.url)
            self._context.other_work.forget(worker_id, self._context.clock())
        self._context.indexes.forget(worker_id)
        return watcher

    async def close(self) -> None:
        watchers = list(self._watchers.values())
        self._watchers.clear()
        await asyncio.gather(*(watcher.close() for watcher in watchers))
        self._context.zmq_context.close()

"""All watchers: one for each worker of the fleet, started and stopped as workers come and go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import zmq

from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet
from stoker.fleet.spec import WorkerSpec
from stoker.gateway.prefix.conversation import KeyMakers
from stoker.gateway.watch.watcher import Surroundings, Watcher, WatchSettings
from stoker.proto.messages import WorkerInfo
from stoker.routing.router import PrefixIndexes

__all__ = ["WatchSettings", "Watchers"]


class Watchers:
    """One Watcher for each worker that is started here."""

    def __init__(
        self,
        fleet: Fleet,
        indexes: PrefixIndexes,
        key_makers: KeyMakers,
        settings: WatchSettings | None = None,
        *,
        secret: str | None = None,
        api_keys: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_lost: Callable[[WorkerId], None] = lambda worker_id: None,
    ) -> None:
        self._around = Surroundings(
            fleet=fleet,
            indexes=indexes,
            key_makers=key_makers,
            settings=settings or WatchSettings(),
            clock=clock,
            secret=secret,
            on_lost=on_lost,
            zmq_context=zmq.Context(),
        )
        self._api_keys = api_keys or {}
        self._watchers: dict[WorkerId, Watcher] = {}

    def start(self, spec: WorkerSpec) -> None:
        """From now on. A known worker whose spec changed is watched anew; one that did not is left alone."""
        known = self._watchers.get(spec.worker_id)
        if known is not None and known.spec == spec:
            return
        self._watchers[spec.worker_id] = Watcher(spec, self._around, self._api_keys.get(spec.url))
        if known is not None:
            known.end()

    def restarted(self, worker_id: WorkerId) -> None:
        """Somebody heard that this worker is a new process: what it said of itself is asked for again."""
        watcher = self._watchers.get(worker_id)
        if watcher is not None:
            watcher.look_again()

    def watcher(self, worker_id: WorkerId) -> Watcher | None:
        return self._watchers.get(worker_id)

    def info(self, worker_id: WorkerId) -> WorkerInfo | None:
        """What the worker last said of itself; None: nothing, or nothing that is known to be true any more."""
        watcher = self._watchers.get(worker_id)
        return None if watcher is None else watcher.info

    def stop(self, worker_id: WorkerId) -> Watcher | None:
        """The worker has left the fleet; it may be back at once. What is returned is to be closed."""
        watcher = self._watchers.pop(worker_id, None)
        if watcher is not None:
            watcher.end()
        self._around.indexes.forget(worker_id)
        return watcher

    async def close(self) -> None:
        watchers = list(self._watchers.values())
        self._watchers.clear()
        await asyncio.gather(*(watcher.close() for watcher in watchers))
        self._around.zmq_context.term()

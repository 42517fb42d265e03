"""The objects that every attempt of the proxy needs besides its route. A gateway has one of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from stoker.fleet.fleet import Fleet
from stoker.gateway.doctor.cache_doctor import CacheDoctor
from stoker.gateway.path.handoff_hints import HandoffHints
from stoker.gateway.path.moves import Moves
from stoker.gateway.path.proxy_settings import ProxySettings
from stoker.gateway.path.upstream import Upstreams
from stoker.gateway.records.metrics import GatewayMetrics


class CleanupTasks:
    """Short tasks that outlive their request. The proxy owns them, and cancels and awaits them when it stops."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class ProxyServices:
    """The objects that running a route uses."""

    fleet: Fleet
    upstreams: Upstreams
    settings: ProxySettings
    metrics: GatewayMetrics
    cleanups: CleanupTasks
    clock: Callable[[], float]
    doctor: CacheDoctor
    moves: Moves
    hints: HandoffHints = field(default_factory=HandoffHints)
    gateway: str = "gateway"  # this gateway's name among those that use the same workers
    # Read for every request, so they are computed once.
    max_event_bytes: int = field(init=False)
    max_answer_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_event_bytes", self.settings.max_event_bytes)
        object.__setattr__(self, "max_answer_bytes", self.settings.max_answer_bytes)

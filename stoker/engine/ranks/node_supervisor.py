"""NodeSupervisor: keeps the ranks of a node running that is not the head.

Its ranks belong to the engine of the head, and end with it. They are then started again, and wait for the head's new engine. A node
whose ranks never served gives up instead: what is wrong at the first start needs a person.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from stoker.base import log as logs
from stoker.base.backoff import BackoffLimits, RestartBackoff
from stoker.base.config import EngineSettings
from stoker.base.errors import StokerError
from stoker.engine.ranks.rank_spawn import COMMAND, SpawnedRank, spawn_rank
from stoker.parallel.rank_link import Kind, LinkEnd

log = logs.EventLog("node")


class NodeFailed(StokerError):
    """The ranks of this node cannot join the engine. The message says why."""

    code = "node_failed"


@dataclass(frozen=True, slots=True)
class NodeModel:
    """What the ranks of this node are started with."""

    folder: Path
    settings: EngineSettings
    cache_dir: Path | None = None  # has the choice of CPU kernels
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def ranks(self) -> range:
        each, node = self.settings.ranks_per_node, self.settings.nodes.rank
        return range(node * each, (node + 1) * each)


@dataclass(frozen=True, slots=True)
class _RunEnd:
    """How the ranks of this node ended."""

    reason: str
    is_stopped: bool = False  # the head was stopped, and does not start again
    served_s: float | None = None  # how long they had served; None: they never did


class NodeSupervisor:
    """Runs in the main thread, whose end ends the ranks."""

    def __init__(
        self, model: NodeModel, on_serving: Callable[[], None] = lambda: None, command: Sequence[str] = COMMAND
    ) -> None:
        """`on_serving` is called each time when all ranks have joined an engine. `command` starts a rank."""
        self._model, self._on_serving, self._command = model, on_serving, command
        self._ranks: dict[int, SpawnedRank] = {}

    async def run(self) -> None:
        """Run until the head stops. Raises NodeFailed if the ranks cannot join. Cancel it to end them."""
        backoff = RestartBackoff(BackoffLimits())
        has_served = False
        while True:
            end = await self._run_once()
            if end.is_stopped:
                return
            has_served = has_served or end.served_s is not None
            if not has_served:
                raise NodeFailed(end.reason)
            pause_s = backoff.pause_s(end.served_s)
            log.error("ranks_ended", reason=end.reason, next_try_s=pause_s)
            await asyncio.sleep(pause_s)

    @property
    def pids(self) -> dict[int, int]:
        """The processes of this node's ranks."""
        return {rank: spawned.process.pid for rank, spawned in self._ranks.items()}

    async def _run_once(self) -> _RunEnd:
        """Start all ranks, wait until the first one ends, and end the others."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[_RunEnd] = loop.create_future()
        serving: set[int] = set()
        served_at: list[float] = []

        def end(reason: str, is_stopped: bool = False) -> None:
            if not ended.done():
                served_s = time.monotonic() - served_at[0] if served_at else None
                ended.set_result(_RunEnd(reason, is_stopped, served_s))

        def read(rank: int, spawned: SpawnedRank) -> None:
            try:
                message = spawned.link.receive()
            except LinkEnd:
                loop.remove_reader(spawned.link.fileno())
                end(f"rank {rank} ended with exit code {spawned.exit_code(1.0)}")
                return
            if message.kind is Kind.START:
                serving.add(rank)
                if len(serving) == len(self._model.ranks):
                    served_at.append(time.monotonic())
                    self._on_serving()
            elif message.kind is Kind.BYE:
                end("the engine was stopped", is_stopped=True)
            elif message.kind is Kind.FAILED:
                end(message.text)

        try:
            for rank in self._model.ranks:
                spawned = self._ranks[rank] = self._spawn(rank)
                loop.add_reader(spawned.link.fileno(), read, rank, spawned)
            return await ended
        finally:
            for spawned in self._ranks.values():
                loop.remove_reader(spawned.link.fileno())
                spawned.kill()
                spawned.process.wait()
                spawned.link.close()
            self._ranks.clear()

    def _spawn(self, rank: int) -> SpawnedRank:
        model = self._model
        arguments = {
            "rank": rank,
            "folder": str(model.folder),
            "settings": asdict(model.settings),
            "random_seed": None,
            "cache_dir": None if model.cache_dir is None else str(model.cache_dir),
        }
        return spawn_rank(self._command, arguments, environment=model.environment)

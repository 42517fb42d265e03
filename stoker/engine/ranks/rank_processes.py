"""RankProcesses: the other ranks as processes, watched by rank 0, which starts those of its own machine.

A rank that dies, hangs or diverges ends the engine: all ranks are killed, so that no collective waits for it. If rank 0 ends,
the kernel kills the other ranks of its machine. Ranks of other nodes come to rank 0 (node_gate.py), and end with their
connection to it.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace

from stoker.base import log as logs
from stoker.base.config import EngineSettings
from stoker.base.errors import ConfigError, StokerError
from stoker.engine.memory import ResolvedSettings
from stoker.engine.part import ModelSource
from stoker.engine.ranks.commands import RankCommands, RankedRunner
from stoker.engine.ranks.connections import RankConnections, connect_ranks, rank_facts
from stoker.engine.ranks.node_gate import NodeGate
from stoker.engine.ranks.place import RankPlace, plan_shards
from stoker.engine.ranks.rank_kv import KV_REPORTS, RankKv
from stoker.engine.ranks.rank_spawn import COMMAND, SpawnedRank, spawn_rank
from stoker.engine.runner import Runner, StepRunner
from stoker.models.family import ModelFamily
from stoker.parallel.collectives import ExchangeFailed
from stoker.parallel.plan_stream import PlanStream
from stoker.parallel.plan_transport import PlansStuck, PlanWriter
from stoker.parallel.rank_link import Kind, LinkEnd, LinkMessage, RankLink
from stoker.parallel.rank_watch import CHECK_EVERY_S, RankLost, RankWatch
from stoker.parallel.ring import RingFiles, RingWriter

_SILENT_S = 4.0  # shorter than the server's limit for the engine process, so that the rank is named
_START_S = 300.0  # imports from a slow drive, and weights that are being packed
_EXPLAIN_S = 6.0  # a failed collective and the reason for it arrive in any order
_PLANS_DEADLINE_S = 10.0
_RING_BYTES = 16 << 20  # nearly all plans are some KB; one with long new prompts may be longer than the ring
_HOST = "127.0.0.1"

log = logs.EventLog("ranks")


class RankProcesses:
    """The ranks but rank 0, which is the caller."""

    def __init__(
        self, on_lost: Callable[[RankLost], None] = lambda lost: None, command: Sequence[str] = COMMAND
    ) -> None:
        """`on_lost` is called on another thread when a rank is lost. `command` starts a rank."""
        self._on_lost, self._command = on_lost, command
        self._processes: dict[int, SpawnedRank] = {}
        self._links: dict[int, RankLink] = {}
        self._remote: dict[int, RankLink] = {}  # those of ranks on other nodes
        self._lock = threading.Condition()
        self._files: RingFiles | None = None
        self._gate: NodeGate | None = None
        self._plans: list[PlanWriter] = []
        self._streams: list[PlanStream] = []
        self._settings = EngineSettings()
        self._commands: RankCommands | None = None
        self._kv: RankKv | None = None
        self._addresses: dict[int, str] = {}  # of the ranks' KV servers
        self._watch = RankWatch(1, _SILENT_S, _START_S, 0.0)
        self._connections: RankConnections | None = None
        self._is_closed = False
        self._is_final = False  # the other nodes were told that the engine does not start again
        self._watching: threading.Thread | None = None

    # ---- RankHost

    def connect(
        self,
        source: ModelSource,
        family: ModelFamily,
        settings: EngineSettings,
        resolved: ResolvedSettings,
        engine_id: str,
    ) -> RankPlace:
        plan_shards(family, resolved)  # raises ConfigError for a model that cannot be split like this
        self._settings, num_ranks = settings, resolved.layout.num_ranks
        num_local, nodes = settings.ranks_per_node, settings.nodes
        self._watch = RankWatch(num_ranks, _SILENT_S, nodes.wait_s + _START_S, time.monotonic())
        self._files = RingFiles.create(num_local - 1)
        if nodes.count > 1:
            self._gate = NodeGate(settings, rank_facts(source, settings), self._arrived, self._refused)
        for rank in range(1, num_local):
            self._spawn(rank, source)
        self._watching = threading.Thread(target=self._run_watch, name="rank-watch", daemon=True)
        self._watching.start()
        with self._telling_nodes():
            self._wait_for(
                lambda: self._watch.all_connected, self._missing, nodes.wait_s if nodes.count > 1 else _START_S
            )
            self._connections = self._meet(source, family, resolved, engine_id)
        place = self._connections.place

        def agree_on(number: int) -> int:
            try:
                return place.agree_on(number)
            except ExchangeFailed as error:
                raise self.explain(error) from error

        return replace(place, agree_on=agree_on)

    def drive(self, runner: Runner) -> StepRunner:
        assert self._files is not None
        assert self._connections is not None
        self._plans.append(RingWriter(self._files, _RING_BYTES, _PLANS_DEADLINE_S))
        with self._telling_nodes():
            self._wait_for(lambda: self._watch.all_ready, _slow_load, _START_S)
        self._streams = [PlanStream(link, rank, _PLANS_DEADLINE_S) for rank, link in self._remote.items()]
        self._plans += self._streams
        for link in self._links.values():
            link.send(LinkMessage(Kind.START))
        self._commands = RankCommands(self)
        return RankedRunner(runner, self._commands, self._connections.place.tells_when_to_sample)

    def other_kv(self, wake: Callable[[], None]) -> RankKv:
        assert self._commands is not None, "drive() comes first"
        kv = RankKv(self._commands, len(self._links), wake)
        with self._lock:
            self._kv = kv
        return kv

    @property
    def kv_addresses(self) -> list[str]:
        with self._lock:
            return [self._addresses[rank] for rank in sorted(self._addresses)]

    def dismiss(self) -> None:
        with self._lock:
            self._is_final = True
        self._tell_nodes(LinkMessage(Kind.BYE))

    def close(self) -> None:
        """End all ranks."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        self._kill()
        if was_closed:
            return
        if self._watching is not None and self._watching is not threading.current_thread():
            self._watching.join(2 * CHECK_EVERY_S)
        if self._gate is not None:
            self._gate.close()
        for spawned in self._processes.values():
            spawned.process.wait()
        for stream in self._streams:
            stream.close()
        for link in self._links.values():
            link.close()
        if self._files is not None:
            self._files.close()
        if self._connections is not None:
            self._connections.close()

    # ---- Ranks

    def check(self) -> None:
        with self._lock:
            if self._watch.verdict is not None:
                raise RankLost(self._watch.verdict)
            if self._is_closed:
                raise RankLost("the ranks are closed")

    def send(self, frame: bytes) -> None:
        try:
            for plans in self._plans:
                plans.send(frame)
        except PlansStuck as error:
            raise self.explain(error) from error

    def expect(self, kind: Kind, step: int, digest: int) -> None:
        with self._lock:
            self._watch.expect(kind, step, digest)

    def explain(self, error: Exception) -> Exception:
        give_up_s = time.monotonic() + _EXPLAIN_S
        with self._lock:
            while self._watch.verdict is None and not self._is_closed and time.monotonic() < give_up_s:
                self._lock.wait(CHECK_EVERY_S)
            return RankLost(self._watch.verdict or f"an exchange with the other ranks failed: {error}")

    # ---- processes

    @property
    def pids(self) -> dict[int, int]:
        """The process of each rank of this machine but rank 0."""
        return {rank: spawned.process.pid for rank, spawned in self._processes.items()}

    def _spawn(self, rank: int, source: ModelSource) -> None:
        assert self._files is not None
        fds = (self._files.memory, self._files.events[rank - 1])
        settings = replace(self._settings, nodes=replace(self._settings.nodes, key=None))  # only the head needs the key
        spawned = spawn_rank(
            self._command,
            {
                "rank": rank,
                "folder": str(source.folder),
                "settings": asdict(settings),
                "random_seed": source.random_seed,
                "cache_dir": None if source.cache_dir is None else str(source.cache_dir),
                "ring": [*fds, rank - 1, len(self._files.events)],
            },
            fds,
        )
        self._processes[rank], self._links[rank] = spawned, spawned.link

    def _meet(
        self, source: ModelSource, family: ModelFamily, resolved: ResolvedSettings, engine_id: str
    ) -> RankConnections:
        """Tell all ranks where they connect to each other, and connect."""
        host = _HOST
        if self._gate is not None:
            host = self._gate.host
            self._gate.close()
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = listener.getsockname()[1]
        for link in self._links.values():
            with suppress(LinkEnd):  # the watch names the rank that has ended
                link.send_json(Kind.MEET, {"host": host, "port": port, "engine_id": engine_id})
        try:
            return connect_ranks(0, source, family, self._settings, resolved, host, port, listener)
        except (RuntimeError, ConfigError) as error:
            raise self._explain_start(error) from error

    def _kill(self) -> None:
        for spawned in self._processes.values():
            spawned.kill()

    def _wait_for(self, is_done: Callable[[], bool], problem: Callable[[float], str], timeout_s: float) -> None:
        give_up_s = time.monotonic() + timeout_s
        with self._lock:
            while not is_done():
                if self._watch.verdict is not None:
                    raise RankLost(self._watch.verdict)
                if time.monotonic() > give_up_s:
                    raise RankLost(problem(timeout_s))
                self._lock.wait(CHECK_EVERY_S)

    def _explain_start(self, error: Exception) -> Exception:
        """Return the reason of a failed start: rank 0's own, or that of the rank that ended."""
        return error if isinstance(error, ConfigError) else self.explain(error)

    # ---- ranks of other nodes

    def _arrived(self, rank: int, link: RankLink, came_from: str) -> str | None:
        node = rank // self._settings.ranks_per_node
        with self._lock:
            if self._watch.verdict is not None or self._is_closed:
                return self._watch.verdict or "the engine of node 0 does not start"
            if rank in self._links:
                return f"node {node} has already arrived; each node needs a --node-rank of its own"
            self._links[rank] = self._remote[rank] = link
            self._watch.arrived(rank, f"node {node}, {came_from}", time.monotonic())
            self._lock.notify_all()
        log.event("rank_arrived", rank=rank, address=came_from)
        return None

    def _refused(self, error: StokerError) -> None:
        with self._lock:
            self._watch.fail(error.message)
            self._lock.notify_all()

    def _missing(self, timeout_s: float) -> str:
        missing, each = self._watch.missing, self._settings.ranks_per_node
        nodes = sorted({rank // each for rank in missing} - {0})
        if not nodes:
            return f"rank {missing[0]} did not start within {timeout_s:g} s"
        named = ", ".join(map(str, nodes))
        return (
            f"node {named} did not arrive at --head {self._settings.nodes.head} within {timeout_s:g} s; start `stoker serve` "
            f"there with --node-rank {named}, or raise --node-wait-s"
        )

    @contextmanager
    def _telling_nodes(self) -> Iterator[None]:
        """Tell the other nodes why a start fails."""
        try:
            yield
        except StokerError as error:
            self._tell_nodes(LinkMessage(Kind.FAILED, text=error.message))
            raise

    def _tell_nodes(self, message: LinkMessage) -> None:
        for link in list(self._remote.values()):
            with suppress(LinkEnd):
                link.send(message)

    # ---- the watching thread

    def _run_watch(self) -> None:
        ended: set[int] = set()
        while True:
            with self._lock:
                links = {rank: link for rank, link in self._links.items() if rank not in ended}
            readable = select.select(list(links.values()), [], [], CHECK_EVERY_S)[0]
            now = time.monotonic()
            messages: list[tuple[int, LinkMessage | None]] = []
            for rank in [rank for rank, link in links.items() if link in readable]:
                try:
                    messages.append((rank, links[rank].receive()))
                except LinkEnd:
                    ended.add(rank)
                    messages.append((rank, None))
            with self._lock:
                if self._is_closed or self._is_final:
                    return
                for rank, message in messages:
                    if message is not None:
                        self._received(rank, message, now)
                    else:
                        spawned = self._processes.get(rank)
                        self._watch.ended(rank, None if spawned is None else spawned.exit_code(1.0))
                verdict = self._watch.check(now)
                self._lock.notify_all()
            if verdict is not None:
                log.error("rank_lost", reason=verdict)
                self._kill()
                self._tell_nodes(LinkMessage(Kind.FAILED, text=verdict))
                if self._connections is not None:
                    self._connections.close()  # rank 0 may wait for the lost rank
                self._on_lost(RankLost(verdict))
                return

    def _received(self, rank: int, message: LinkMessage, now: float) -> None:
        self._watch.received(rank, message, now)
        if message.kind is Kind.READY and message.text:
            self._addresses[rank] = message.text
        elif message.kind in KV_REPORTS and self._kv is not None:
            self._kv.received(rank, message)


def _slow_load(timeout_s: float) -> str:
    return f"the ranks did not load their weights within {timeout_s:g} s"

"""RankProcesses: the other ranks as processes of this machine, started and watched by rank 0.

A rank that dies, hangs or diverges ends the engine: all ranks are killed, so that no collective waits for it. If rank 0 ends,
the kernel kills the other ranks.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from stoker.base import log as logs
from stoker.base.config import EngineSettings
from stoker.base.errors import ConfigError
from stoker.base.orphans import die_with
from stoker.engine.memory import ResolvedSettings
from stoker.engine.part import ModelSource
from stoker.engine.ranks.commands import RankCommands, RankedRunner
from stoker.engine.ranks.connections import RankConnections, connect_ranks
from stoker.engine.ranks.place import RankPlace, plan_shards
from stoker.engine.ranks.rank_kv import KV_REPORTS, RankKv
from stoker.engine.runner import Runner, StepRunner
from stoker.models.family import ModelFamily
from stoker.parallel.collectives import ExchangeFailed
from stoker.parallel.rank_link import Kind, LinkEnd, LinkMessage, RankLink
from stoker.parallel.rank_watch import CHECK_EVERY_S, RankLost, RankWatch
from stoker.parallel.ring import RingFiles, RingWriter

COMMAND = (sys.executable, "-m", "stoker.engine.ranks.rank_process")
_SILENT_S = 4.0  # shorter than the server's limit for the engine process, so that the rank is named
_START_S = 300.0  # imports from a slow drive, and weights that are being packed
_EXPLAIN_S = 6.0  # a failed collective and the reason for it arrive in any order
_RING_DEADLINE_S = 10.0
_RING_BYTES = 16 << 20  # nearly all plans are some KB; one with long new prompts may be longer than the ring
_HOST = "127.0.0.1"

log = logs.EventLog("ranks")


class RankProcesses:
    """Starts a process for each rank but rank 0, which is the caller."""

    def __init__(
        self, on_lost: Callable[[RankLost], None] = lambda lost: None, command: Sequence[str] = COMMAND
    ) -> None:
        """`on_lost` is called on another thread when a rank is lost. `command` starts a rank."""
        self._on_lost, self._command = on_lost, command
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._links: dict[int, RankLink] = {}
        self._lock = threading.Condition()
        self._files: RingFiles | None = None
        self._ring: RingWriter | None = None
        self._commands: RankCommands | None = None
        self._kv: RankKv | None = None
        self._addresses: dict[int, str] = {}  # of the ranks' KV servers
        self._watch = RankWatch(1, _SILENT_S, _START_S, 0.0)
        self._connections: RankConnections | None = None
        self._is_closed = False
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
        num_ranks = resolved.layout.num_ranks
        self._watch = RankWatch(num_ranks, _SILENT_S, _START_S, time.monotonic())
        self._files = RingFiles.create(num_ranks - 1)
        listener = socket.create_server((_HOST, 0))
        port = listener.getsockname()[1]
        for rank in range(1, num_ranks):
            self._spawn(rank, num_ranks)
            self._links[rank].send_arguments(
                {
                    "rank": rank,
                    "folder": str(source.folder),
                    "settings": asdict(settings),
                    "engine_id": engine_id,
                    "random_seed": source.random_seed,
                    "cache_dir": None if source.cache_dir is None else str(source.cache_dir),
                    "host": _HOST,
                    "port": port,
                }
            )
        self._watching = threading.Thread(target=self._run_watch, name="rank-watch", daemon=True)
        self._watching.start()
        self._wait_for(lambda: self._watch.all_connected, "start")
        try:
            self._connections = connect_ranks(0, source, family, settings, resolved, _HOST, port, listener)
        except (RuntimeError, ConfigError) as error:
            raise self._explain_start(error) from error
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
        self._ring = RingWriter(self._files, _RING_BYTES, _RING_DEADLINE_S)
        self._wait_for(lambda: self._watch.all_ready, "load their weights")
        for link in self._links.values():
            link.send(LinkMessage(Kind.START))
        self._commands = RankCommands(self)
        return RankedRunner(runner, self._commands, is_deferred=self._connections.place.stages.is_deferred)

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

    def close(self) -> None:
        """End all ranks."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        self._kill()
        if was_closed:
            return
        if self._watching is not None and self._watching is not threading.current_thread():
            self._watching.join(2 * CHECK_EVERY_S)
        for process in self._processes.values():
            process.wait()
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
        assert self._ring is not None, "drive() comes first"
        self._ring.send(frame)

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
        """The process of each rank but rank 0."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def _spawn(self, rank: int, num_ranks: int) -> None:
        assert self._files is not None
        ours, theirs = socket.socketpair()
        event = self._files.events[rank - 1]
        with theirs:
            fds = (theirs.fileno(), self._files.memory, event)
            self._processes[rank] = subprocess.Popen(
                [*self._command, *map(str, fds), str(rank - 1), str(num_ranks - 1)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=die_with(os.getpid()) if sys.platform == "linux" else None,
            )
        self._links[rank] = RankLink(ours)

    def _kill(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()

    def _wait_for(self, is_done: Callable[[], bool], what: str) -> None:
        give_up_s = time.monotonic() + _START_S
        with self._lock:
            while not is_done():
                if self._watch.verdict is not None:
                    raise RankLost(self._watch.verdict)
                if time.monotonic() > give_up_s:
                    raise RankLost(f"the ranks did not {what} within {_START_S:g} s")
                self._lock.wait(CHECK_EVERY_S)

    def _explain_start(self, error: Exception) -> Exception:
        """Return the reason of a failed start: rank 0's own, or that of the rank that ended."""
        return error if isinstance(error, ConfigError) else self.explain(error)

    # ---- the watching thread

    def _run_watch(self) -> None:
        open_ranks = set(self._links)
        while True:
            readable = select.select([self._links[rank] for rank in open_ranks], [], [], CHECK_EVERY_S)[0]
            now = time.monotonic()
            messages: list[tuple[int, LinkMessage | None]] = []
            for rank in [rank for rank in open_ranks if self._links[rank] in readable]:
                try:
                    messages.append((rank, self._links[rank].receive()))
                except LinkEnd:
                    open_ranks.discard(rank)
                    messages.append((rank, None))
            with self._lock:
                if self._is_closed:
                    return
                for rank, message in messages:
                    if message is not None:
                        self._received(rank, message, now)
                    else:
                        self._watch.ended(rank, self._exit_code(rank))
                verdict = self._watch.check(now)
                self._lock.notify_all()
            if verdict is not None:
                log.error("rank_lost", reason=verdict)
                self._kill()
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

    def _exit_code(self, rank: int) -> int | None:
        """Return the exit code of a rank whose connection has ended. A process that is ending may take a moment."""
        try:
            return self._processes[rank].wait(1.0)
        except subprocess.TimeoutExpired:
            return None

"""All ranks of an engine as threads of one process, with the loop and the collectives' order of real ranks."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from torch import Tensor

from stoker.base.config import EngineSettings
from stoker.engine.memory import ResolvedSettings
from stoker.engine.part import EnginePart, ModelSource, build_part, identity_of, tier_share
from stoker.engine.ranks.absent_grammars import AbsentGrammars
from stoker.engine.ranks.commands import RankCommands, RankedRunner, RankLoop
from stoker.engine.ranks.place import RankPlace, find_place
from stoker.engine.ranks.rank_kv import KV_REPORTS, RankKv
from stoker.engine.ranks.rank_kv_part import RankKvPart
from stoker.engine.runner import Runner, StepRunner
from stoker.models.family import ModelFamily
from stoker.parallel.collectives import Collectives
from stoker.parallel.rank_link import Kind, LinkMessage
from stoker.parallel.rank_watch import RankLost, RankWatch
from stoker.parallel.threads import ThreadWorld


class OwnNumber:
    """The group of all ranks, for ranks that are built one after the other: each keeps its own number of blocks."""

    rank, num_ranks = 0, 1

    def gather(self, x: Tensor) -> list[Tensor]:
        return [x]


class VirtualRanks:
    def __init__(self) -> None:
        self.parts: dict[int, EnginePart] = {}
        self.kv_parts: dict[int, RankKvPart] = {}
        self._kv: RankKv | None = None
        self._queues: dict[int, queue.SimpleQueue[bytes | None]] = {}
        self._threads: list[threading.Thread] = []
        self._places: dict[int, RankPlace] = {}
        self._watch = RankWatch(1, 60.0, 60.0, time.monotonic())
        self._lock = threading.Lock()

    def connect(
        self,
        source: ModelSource,
        family: ModelFamily,
        settings: EngineSettings,
        resolved: ResolvedSettings,
        engine_id: str,
    ) -> RankPlace:
        num_ranks = resolved.layout.num_ranks
        self._world = ThreadWorld(num_ranks)
        self._watch = RankWatch(num_ranks, 60.0, 60.0, time.monotonic())
        for rank in range(num_ranks):

            def make_group(name: str, ranks: tuple[int, ...], rank: int = rank) -> Collectives:
                return self._world.group(ranks, rank)

            self._places[rank] = find_place(rank, family, resolved, make_group, OwnNumber())  # type: ignore[arg-type]
        self._build = lambda place: build_part(family, source, settings, resolved, place, AbsentGrammars())

        def make_kv(rank: int) -> RankKvPart:
            part = self.parts[rank]
            options = (identity_of(family, source, part), rank, engine_id, tier_share(family, part))
            return RankKvPart(settings, part.kv, *options, lambda message: self._report(rank, message))

        self._make_kv = make_kv
        return self._places[0]

    def drive(self, runner: Runner) -> StepRunner:
        for rank, place in self._places.items():
            if rank:
                self.parts[rank] = self._build(place)
                self.kv_parts[rank] = self._make_kv(rank)
                self._queues[rank] = queue.SimpleQueue()
                self._threads.append(threading.Thread(target=self._run, args=(rank, place), daemon=True))
        for thread in self._threads:
            thread.start()
        self._commands = RankCommands(self)
        return RankedRunner(runner, self._commands, self._places[0].tells_when_to_sample)

    def other_kv(self, wake: Callable[[], None]) -> RankKv:
        self._kv = RankKv(self._commands, len(self.parts), wake)
        return self._kv

    @property
    def kv_addresses(self) -> list[str]:
        return [kv.server.address for kv in self.kv_parts.values() if kv.server is not None]

    def _report(self, rank: int, message: LinkMessage) -> None:
        with self._lock:
            self._watch.received(rank, message, time.monotonic())
        if message.kind in KV_REPORTS:
            assert self._kv is not None
            self._kv.received(rank, message)

    def _run(self, rank: int, place: RankPlace) -> None:
        def report(kind: Kind, step: int, digest: int) -> None:
            self._report(rank, LinkMessage(kind, step, digest))

        stages = place.stages
        options = {"samples": stages.is_first, "deferred": stages.is_deferred}
        loop = RankLoop(self.parts[rank].runner, self.kv_parts[rank], report, **options, steps_ahead=0)
        try:
            while True:
                try:
                    frame = self._queues[rank].get(timeout=0.01)
                except queue.Empty:
                    loop.finish()
                    continue
                if frame is None:
                    return
                loop.execute(frame)
        except Exception as error:
            self._report(rank, LinkMessage(Kind.FAILED, text=repr(error)))
            self._world.close()

    def check(self) -> None:
        with self._lock:
            if self._watch.verdict is not None:
                raise RankLost(self._watch.verdict)

    def send(self, frame: bytes) -> None:
        for one in self._queues.values():
            one.put(frame)

    def expect(self, kind: Kind, step: int, digest: int) -> None:
        with self._lock:
            self._watch.expect(kind, step, digest)

    def explain(self, error: Exception) -> Exception:
        with self._lock:
            return RankLost(self._watch.verdict or str(error))

    def dismiss(self) -> None:
        pass

    def close(self) -> None:
        for one in self._queues.values():
            one.put(None)
        if any(thread.is_alive() for thread in self._threads):
            for thread in self._threads:
                thread.join(10.0)
        self._world.close()
        for kv in self.kv_parts.values():
            kv.close()

"""The engine's process: a mailbox in front of one Engine. Started by engine_main.py, which has its settings."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stoker.base import garbage
from stoker.base import log as logs
from stoker.base.allowance import usable_cores
from stoker.base.config import StoreSettings
from stoker.base.errors import InvalidRequest, StokerError
from stoker.base.ids import RequestId
from stoker.base.timeline import Timeline
from stoker.engine.build import BuiltEngine, build_engine, read_hf_config
from stoker.engine.gpu_memory import TOLERANCE_BYTES, MemoryLine
from stoker.engine.process.block_log import BlockLog
from stoker.engine.process.grammars.late_grammars import LateGrammars
from stoker.engine.process.grammars.trials import is_tame
from stoker.engine.process.idle_tasks import Chore, QuietTime
from stoker.kv.store.kv_store import KvStore
from stoker.kv.store.tier_use import TierUse
from stoker.models.family import family_of
from stoker.models.reader import ReadAhead
from stoker.proto.messages import (
    Add,
    Cancel,
    Chunks,
    EngineArguments,
    EngineInfo,
    EngineStats,
    KvEvents,
    LoadProgress,
    Prefetch,
    Release,
    Shutdown,
    StartFailed,
    TierReport,
    ToEngine,
)
from stoker.proto.pipe import EngineEnd, FrameEnd
from stoker.sched.request import GenerateRequest, GrammarSpec, TokenChunks

_STATS_EVERY_S = 0.25
_LOOK_EVERY_S = 0.05  # while idle with leases or deadlines open
_PROGRESS_EVERY_S = 0.1
# Without a request, before what would disturb one: to capture steps, which makes requests fast, and to try a grammar.
_CAPTURES_AFTER_S, _GRAMMARS_AFTER_S = 0.25, 2.0
_COMPILERS, _MOST_TRIALS = 4, 8
_LOOKERS = 2

log = logs.EventLog("engine")


def _give_way() -> None:
    """This thread runs when the engine's own does not want the core. (On Linux a thread has a niceness of its own.)"""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


class Prepared(msgspec.Struct, frozen=True):
    """A grammar that has been compiled, or could not be."""

    spec: GrammarSpec
    error: InvalidRequest | None
    kept: object = None  # to be kept while somebody may need it


class Found(msgspec.Struct, frozen=True):
    """A request, and how many of its leading blocks are worth loading from the store."""

    request: GenerateRequest
    num_blocks: int


class Wake(msgspec.Struct, frozen=True):
    """Something happened on another thread that the engine should look at."""


Message = ToEngine | Prepared | Found | Wake


class Mailbox:
    """Reads the pipe on a thread, so that the server never waits for a step; grammars are compiled on others, and the store
    is asked on others still."""

    def __init__(self, pipe: EngineEnd, grammars: LateGrammars) -> None:
        self._pipe = pipe
        self._grammars = grammars
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._woken = threading.Event()  # there is a Wake in the queue: one is enough
        # Several, for a schema may take a moment and must not hold up the simple ones behind it. What has to be tried first may
        # take as long as a trial can: those hold up each other alone, and half of the processors.
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="grammar", initializer=_give_way)
        num_trials = min(_MOST_TRIALS, max(2, usable_cores() // 2))
        self._trials = ThreadPoolExecutor(num_trials, thread_name_prefix="grammar", initializer=_give_way)
        self._lookers = ThreadPoolExecutor(_LOOKERS, thread_name_prefix="kv-look")
        threading.Thread(target=self._read, name="mailbox", daemon=True).start()

    def warm_up(self) -> None:
        """Seconds of importing and reading the vocabulary that the first request with a grammar need not wait for."""
        self._compilers.submit(self._grammars.warm_up)

    def take(self, wait: bool, timeout_s: float | None = None) -> list[Message]:
        messages: list[Message] = []
        if wait:
            with suppress(queue.Empty):
                messages.append(self._messages.get(timeout=timeout_s))
        while not self._messages.empty():
            messages.append(self._messages.get())
        self._woken.clear()
        return messages

    def wake(self) -> None:
        """From any thread."""
        if not self._woken.is_set():
            self._woken.set()
            self._messages.put(Wake())

    def look_up(self, request: GenerateRequest, store: KvStore) -> None:
        """A Found will follow."""
        self._lookers.submit(self._look_up, request, store)

    def _look_up(self, request: GenerateRequest, store: KvStore) -> None:
        num_blocks = 0
        try:
            num_blocks = store.num_worth_loading(request.token_ids, request.cache_salt)
        except Exception:  # whatever a tier may throw: the request must go on without it
            log.error("kv_lookup_failed", exc_info=True)
        self._messages.put(Found(request, num_blocks))

    def prepare(self, spec: GrammarSpec) -> Future[None]:
        """A Prepared will follow, unless it is cancelled before it has begun."""
        compilers = self._compilers if is_tame(spec) else self._trials
        return compilers.submit(self._prepare, spec)

    def _prepare(self, spec: GrammarSpec) -> None:
        try:
            self._messages.put(Prepared(spec, None, self._grammars.prepare(spec)))
        except InvalidRequest as error:
            self._messages.put(Prepared(spec, error))
        except Exception as error:  # whatever a compiler may throw: those who wait for it must hear of it
            log.error("grammar_failed", exc_info=True, kind=spec.kind)
            self._messages.put(
                Prepared(spec, InvalidRequest(f"no grammar could be made: {error}", code="invalid_grammar"))
            )

    def _read(self) -> None:
        try:
            while True:
                self._messages.put(self._pipe.receive())
        except FrameEnd:
            os._exit(0)  # the server has gone; nobody is left to answer
        except msgspec.DecodeError:
            log.error("mailbox_broken", exc_info=True)
            os._exit(1)  # deaf, but alive to all who look: better to be started again


@dataclass(slots=True, eq=False)
class _Preparing:
    compiling: Future[None]
    waiting: list[RequestId] = field(default_factory=list)


class EngineLoop:
    def __init__(self, built: BuiltEngine, blocks: BlockLog, mailbox: Mailbox, pipe: EngineEnd) -> None:
        self._built = built
        self._engine = built.engine
        self._mailbox = mailbox
        self._pipe = pipe
        self._blocks = blocks
        self._early: dict[RequestId, GenerateRequest] = {}  # not the engine's yet: others see to grammar or blocks
        self._preparing: dict[GrammarSpec, _Preparing] = {}
        # Of the open requests: to compile one again, for a row that comes back, would hold up all others.
        self._kept_grammars: dict[RequestId, object] = {}
        self._media = {use.name: use.tier.medium for use in built.store.tiers}
        self._stats_at_s = 0.0
        self._quiet = QuietTime(
            [Chore(_CAPTURES_AFTER_S, self._engine.capture_next_graph), Chore(_GRAMMARS_AFTER_S, mailbox.warm_up)]
        )

    def run(self) -> None:
        while True:
            idle = self._engine.idle
            waits_for_events = self._engine.has_work or self._engine.has_leases
            if idle and not waits_for_events:
                self._pipe.send(self._stats())
            timeout_s = _LOOK_EVERY_S if waits_for_events else self._quiet.wait_s
            messages = self._mailbox.take(wait=idle, timeout_s=timeout_s)
            if idle and not waits_for_events and not messages:
                self._quiet.use()
                continue
            self._quiet.disturbed()
            for message in messages:
                if isinstance(message, Shutdown):
                    return
                self._handle(message)
            chunks = self._engine.step()
            for number in chunks.finishes:
                self._kept_grammars.pop(chunks.request_ids[number], None)
            self._tell_stats(messages, chunks)
            if chunks:
                self._pipe.send(Chunks(chunks=chunks))
            for event in self._built.store.take_events():
                self._blocks.tier_changed(self._media[event.tier], event.stored, event.removed)
            if changes := self._blocks.take():
                self._pipe.send(KvEvents(events=changes))

    def _tell_stats(self, messages: Sequence[Message], chunks: TokenChunks) -> None:
        """Now and then, and before anybody hears that a request has begun or ended: whoever has an answer finds it counted."""
        is_other = any(isinstance(message, Add | Cancel) for message in messages)
        now = time.monotonic()
        if is_other or chunks.finishes or now - self._stats_at_s >= _STATS_EVERY_S:
            self._stats_at_s = now
            self._pipe.send(self._stats())

    def _handle(self, message: Message) -> None:
        match message:
            case Add(request=request):
                self._add(request)
            case Prepared(spec=spec, error=error, kept=kept):
                for request in self._still_wanted(self._preparing.pop(spec).waiting):
                    if error is None:
                        self._kept_grammars[request.request_id] = kept
                        self._look_up(request)
                    else:
                        self._engine.reject(request, error)
            case Found(request=request, num_blocks=num_blocks):
                for wanted in self._still_wanted([request.request_id]):
                    self._engine.add(wanted, num_blocks)
            case Cancel(request_id=request_id):
                for request in self._still_wanted([request_id]):
                    if request.ticket is not None:  # the engine, which gives back others, has not seen it
                        self._built.store.release(request.ticket)
                    self._waits_no_more(request)
                self._kept_grammars.pop(request_id, None)
                self._engine.cancel(request_id)
            case Prefetch(token_ids=token_ids, cache_salt=salt, ticket=ticket):
                self._built.store.prefetch(token_ids, salt, ticket)
            case Release(lease_id=lease_id):
                self._engine.release_lease(lease_id)

    def _still_wanted(self, request_ids: Sequence[RequestId]) -> list[GenerateRequest]:
        """Of those that were early: who was not cancelled. They go on from here."""
        early = [self._early.pop(request_id, None) for request_id in request_ids]
        return [request for request in early if request is not None]

    def _add(self, request: GenerateRequest) -> None:
        spec = request.sampling.grammar
        if spec is None:
            self._look_up(request)
            return
        self._early[request.request_id] = request
        if spec not in self._preparing:
            self._preparing[spec] = _Preparing(self._mailbox.prepare(spec))
        self._preparing[spec].waiting.append(request.request_id)

    def _waits_no_more(self, request: GenerateRequest) -> None:
        """A grammar that nobody waits for is not compiled, if that has not begun."""
        spec = request.sampling.grammar
        preparing = self._preparing.get(spec) if spec is not None else None
        if spec is None or preparing is None or request.request_id not in preparing.waiting:
            return
        preparing.waiting.remove(request.request_id)
        if not preparing.waiting and preparing.compiling.cancel():
            del self._preparing[spec]

    def _look_up(self, request: GenerateRequest) -> None:
        """What the store has of it is found out on other threads; it is added when they have looked."""
        if not self._built.store.tiers:
            self._engine.add(request)
            return
        self._early[request.request_id] = request
        self._mailbox.look_up(request, self._built.store)

    def _stats(self) -> EngineStats:
        scheduler, pool, counters = self._built.scheduler, self._built.pool, self._built.scheduler.counters
        return EngineStats(
            waiting_sequences=scheduler.num_waiting + len(self._early),
            waiting_tokens=scheduler.waiting_tokens,
            running_sequences=scheduler.num_running,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_named,
            num_blocks=pool.num_blocks,
            steps=self._engine.num_steps,
            step_s=self._engine.step_s,
            prompt_tokens=counters.prompt_tokens,
            computed_tokens=counters.computed_tokens,
            cached_tokens=counters.cached_tokens,
            partial_tokens=counters.partial_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=counters.preemptions,
            prefill_tokens_per_s=self._engine.rates.prefill_tokens_per_s,
            decode_step_s=self._engine.rates.decode_step_s,
            loading_sequences=scheduler.num_loading,
            held_leases=scheduler.num_held,
            loaded_tokens=counters.loaded_tokens,
            pulled_tokens=counters.pulled_tokens,
            failed_loads=counters.failed_loads,
            tiers=[self._tier_report(use) for use in self._built.store.tiers],
        )

    def _tier_report(self, use: TierUse) -> TierReport:
        figures, tier = use.figures, use.tier.stats()
        return TierReport(
            name=use.name,
            medium=use.tier.medium,
            blocks=tier.blocks,
            used_bytes=tier.used_bytes,
            capacity_bytes=tier.capacity_bytes,
            hits=figures.hits,
            misses=figures.misses,
            read_bytes=figures.read_bytes,
            written_bytes=figures.written_bytes,
            read_s=figures.read_s,
            write_s=figures.write_s,
            declined=figures.declined,
            evicted=tier.evicted,
            corrupt=tier.corrupt,
            errors=figures.errors + tier.errors,
            bytes_per_s=use.speed.measured,
            crossover_tokens=self._built.store.crossover_tokens(use),
        )


def serve(
    pipe: EngineEnd,
    arguments: EngineArguments,
    ahead: ReadAhead,
    timeline: Timeline,
) -> None:
    folder = Path(arguments.folder)
    reported_s = 0.0

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal reported_s
        now = time.monotonic()
        if done == total or now - reported_s > _PROGRESS_EVERY_S:
            reported_s = now
            pipe.send(LoadProgress(stage=stage, done=done, total=total))

    try:
        family = family_of(read_hf_config(folder), str(folder))
        grammars = LateGrammars(folder, family.shape.vocab_size)
        blocks = BlockLog()
        observer = blocks if arguments.kv_events else None
        mailbox = Mailbox(pipe, grammars)
        built = build_engine(
            folder,
            arguments.settings,
            grammars=grammars,
            observer=observer,
            progress=progress,
            timeline=timeline,
            ahead=ahead,
            wake=mailbox.wake,
        )
    except StokerError as error:
        pipe.send(StartFailed(code=error.code, message=error.message))
        return
    settings, store = built.settings, built.store
    garbage.tune_for_serving()
    pipe.send(
        EngineInfo(
            model_fingerprint=built.fingerprint,
            device=str(settings.device),
            dtype=built.layout.dtype,
            vocab_size=built.vocab_size,
            max_model_tokens=built.max_model_tokens,
            block_tokens=built.layout.block_tokens,
            num_blocks=built.pool.num_blocks,
            max_rows=settings.max_rows,
            load_s=built.load_s,
            engine_id=built.engine_id,
            kv_address=built.server.address if built.server is not None else None,
            stores=_stores(arguments.settings.store, built.fingerprint, store.tiers),
        )
    )
    _log_memory(built.memory)
    if arguments.timeline_origin_s is not None:
        timeline.tell(log)
    store.tell_held()
    try:
        EngineLoop(built, blocks, mailbox, pipe).run()
    finally:
        built.close()


def _stores(settings: StoreSettings, fingerprint: str, tiers: Sequence[TierUse]) -> dict[str, str]:
    """Where each shared tier's blocks lie, by medium: workers that say the same read each other's."""
    machine = socket.gethostname()
    places = {
        "host": f"{machine}:{settings.name}",
        "disk": f"{machine}:{os.path.realpath(settings.disk_dir or '')}",
        "mooncake": settings.mooncake_master,
    }
    return {use.tier.medium: f"{fingerprint}@{use.name}:{places[use.name]}" for use in tiers if use.tier.shared}


def _log_memory(lines: Sequence[MemoryLine]) -> None:
    """A card's memory as it was planned, and as it is: off by much, there is a mistake in the plan."""
    for line in lines:
        planned_mib, used_mib = line.planned_bytes >> 20, line.used_bytes >> 20
        log.event("memory", line=line.name, planned_mib=planned_mib, used_mib=used_mib)
    off_bytes = sum(line.used_bytes - line.planned_bytes for line in lines if line.name != "reserve")
    if abs(off_bytes) > TOLERANCE_BYTES:
        log.warning("memory_off_plan", off_mib=off_bytes >> 20)

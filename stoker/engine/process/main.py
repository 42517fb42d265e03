"""The engine process's loop: messages to one Engine, and its tokens, statistics and KV events back to the server."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from stoker.base import garbage
from stoker.base import log as logs
from stoker.base.errors import InvalidRequest, StokerError
from stoker.base.ids import RequestId
from stoker.base.timeline import Timeline
from stoker.checkpoint.weight_files import WeightReadAhead
from stoker.engine.build import BuiltEngine, build_engine
from stoker.engine.model_identity import read_hf_config
from stoker.engine.process.block_log import BlockLog
from stoker.engine.process.grammars.compile_queue import CompileJob
from stoker.engine.process.grammars.lazy_grammars import LazyGrammars
from stoker.engine.process.heartbeat import Heartbeat, LoopProgress
from stoker.engine.process.idle_tasks import IdleTask, IdleTasks
from stoker.engine.process.mailbox import GrammarCompiled, Mailbox, MailboxMessage, StoreLookedUp
from stoker.engine.process.reports import engine_info, engine_stats, log_memory
from stoker.engine.ranks.rank_processes import RankProcesses
from stoker.models.family import family_of
from stoker.parallel.rank_watch import RankLost
from stoker.proto.messages import (
    Add,
    Cancel,
    Chunks,
    EngineArguments,
    HandOff,
    KvEvents,
    LoadProgress,
    Prefetch,
    Release,
    Shutdown,
    StartFailed,
)
from stoker.proto.pipe import EngineEnd
from stoker.sched.request import GenerateRequest, GrammarSpec, TokenChunks

_STATS_EVERY_S = 0.25
_POLL_EVERY_S = 0.05  # while idle with open leases or deadlines
_PROGRESS_EVERY_S = 0.1
# How long the engine must be idle before tasks that would delay a request: capturing graphs, and loading xgrammar.
_CAPTURE_AFTER_S, _GRAMMARS_AFTER_S = 0.25, 2.0

log = logs.EventLog("engine")


@dataclass(slots=True, eq=False)
class _PendingGrammar:
    """A grammar that is being compiled, and the requests that wait for it."""

    compiling: CompileJob
    tenants: set[str] = field(default_factory=set)  # in whose queues it waits
    waiting: list[RequestId] = field(default_factory=list)


class _FirstToken:
    """Adds the first request to the timeline of the start, and logs it."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._added_s: float | None = None

    def added(self) -> None:
        if self._added_s is None:
            self._added_s = time.time()

    def sent(self) -> None:
        now_s = time.time()
        self._timeline.add("engine: first request", self._added_s or now_s, now_s)
        self._timeline.log_last_to(log)


class EngineLoop:
    """Passes messages to the engine, steps it, and sends back what it produced."""

    def __init__(
        self,
        built: BuiltEngine,
        blocks: BlockLog,
        mailbox: Mailbox,
        pipe: EngineEnd,
        progress: LoopProgress,
        timeline: Timeline | None = None,
    ) -> None:
        """With a `timeline`, the first request is added to it."""
        self._built = built
        self._engine = built.engine
        self._mailbox = mailbox
        self._pipe = pipe
        self._blocks = blocks
        self._progress = progress
        self._preparing: dict[RequestId, GenerateRequest] = {}  # waiting for a grammar or for the store, not yet added
        self._pending_grammars: dict[GrammarSpec, _PendingGrammar] = {}
        # The grammars of open requests. A preempted row needs its grammar again, and compiling it would stall all rows.
        self._open_grammars: dict[RequestId, object] = {}
        self._media = {tier.name: tier.backend.medium for tier in built.store.tiers}
        self._stats_sent_s = 0.0
        self._first_token = None if timeline is None else _FirstToken(timeline)
        self._idle_tasks = IdleTasks(
            [
                IdleTask(_CAPTURE_AFTER_S, self._engine.capture_next_graph),
                IdleTask(_GRAMMARS_AFTER_S, mailbox.warm_up_grammars),
            ]
        )

    def run(self) -> None:
        """Serve until a Shutdown message arrives."""
        while True:
            idle = self._engine.idle
            waits_for_events = self._engine.has_work or self._engine.has_leases
            if idle and not waits_for_events:
                self._send_stats()
            timeout_s = _POLL_EVERY_S if waits_for_events else self._idle_tasks.wait_s
            self._progress.end()
            messages = self._mailbox.take(wait=idle, timeout_s=timeout_s)
            self._progress.begin()
            if idle and not waits_for_events and not messages:
                self._idle_tasks.run_next()
                continue
            self._idle_tasks.interrupt()
            for message in messages:
                if isinstance(message, Shutdown):
                    if message.is_final:
                        self._built.ranks.dismiss()
                    return
                self._handle(message)
            chunks = self._engine.step()
            for index in chunks.finishes:
                self._open_grammars.pop(chunks.request_ids[index], None)
            self._send_due_stats(messages, chunks)
            if chunks:
                self._pipe.send(Chunks(chunks=chunks))
                if self._first_token is not None:
                    self._first_token.sent()
                    self._first_token = None
            self._send_kv_events()

    # ---- messages

    def _handle(self, message: MailboxMessage) -> None:
        match message:
            case Add(request=request):
                self._add(request)
            case GrammarCompiled(spec=spec, error=error, compiled=compiled):
                self._finish_grammar(spec, error, compiled)
            case StoreLookedUp(request=request, num_blocks=num_blocks):
                for prepared in self._take_preparing([request.request_id]):
                    self._engine.add(prepared, num_blocks)
            case Cancel(request_id=request_id):
                self._cancel(request_id)
            case Prefetch(token_ids=token_ids, cache_salt=salt, ticket=ticket):
                self._built.store.prefetch(token_ids, salt, ticket)
            case Release(lease_id=lease_id):
                self._engine.release_lease(lease_id)
            case HandOff(request_id=request_id, lease_id=lease_id):
                self._hand_off(request_id, lease_id)

    def _add(self, request: GenerateRequest) -> None:
        if self._first_token is not None:
            self._first_token.added()
        spec = request.sampling.grammar
        if spec is None:
            self._look_up(request)
            return
        self._preparing[request.request_id] = request
        pending, tenant, is_urgent = self._pending_grammars.get(spec), request.tenant, not request.is_flex
        if pending is None:
            job = self._mailbox.compile(spec, tenant, is_urgent=is_urgent)
            pending = self._pending_grammars[spec] = _PendingGrammar(job)
        elif tenant not in pending.tenants:
            self._mailbox.compile(spec, tenant, pending.compiling, is_urgent=is_urgent)
        pending.compiling.is_urgent |= is_urgent
        pending.tenants.add(tenant)
        pending.waiting.append(request.request_id)

    def _finish_grammar(self, spec: GrammarSpec, error: InvalidRequest | None, compiled: object) -> None:
        for request in self._take_preparing(self._pending_grammars.pop(spec).waiting):
            if error is None:
                self._open_grammars[request.request_id] = compiled
                self._look_up(request)
            else:
                self._engine.reject(request, error)

    def _look_up(self, request: GenerateRequest) -> None:
        """Add the request to the engine, after another thread has looked up its blocks in the store."""
        if not self._built.store.tiers:
            self._engine.add(request)
            return
        self._preparing[request.request_id] = request
        self._mailbox.look_up(request, self._built.store)

    def _cancel(self, request_id: RequestId) -> None:
        for request in self._take_preparing([request_id]):
            if request.ticket is not None:  # the engine releases the tickets of the requests that it knows
                self._built.store.release(request.ticket)
            self._stop_waiting_for_grammar(request)
        self._open_grammars.pop(request_id, None)
        self._engine.cancel(request_id)

    def _hand_off(self, request_id: RequestId, lease_id: str) -> None:
        for request in self._take_preparing([request_id]):
            self._stop_waiting_for_grammar(request)
            self._engine.hand_back(request)
        self._engine.hand_off(request_id, lease_id)

    def _stop_waiting_for_grammar(self, request: GenerateRequest) -> None:
        """Cancel the compilation of a grammar that no request waits for, if it has not started."""
        spec = request.sampling.grammar
        pending = self._pending_grammars.get(spec) if spec is not None else None
        if spec is None or pending is None or request.request_id not in pending.waiting:
            return
        pending.waiting.remove(request.request_id)
        if not pending.waiting and pending.compiling.cancel():
            del self._pending_grammars[spec]

    def _take_preparing(self, request_ids: Sequence[RequestId]) -> list[GenerateRequest]:
        """Remove requests from those being prepared, and return them. Cancelled requests are not returned."""
        requests = [self._preparing.pop(request_id, None) for request_id in request_ids]
        return [request for request in requests if request is not None]

    # ---- reports

    def _send_due_stats(self, messages: Sequence[MailboxMessage], chunks: TokenChunks) -> None:
        """Send statistics every _STATS_EVERY_S, and before a request's start or end is reported.

        A client that has its answer must find the request in the statistics.
        """
        has_changed = any(isinstance(message, Add | Cancel) for message in messages)
        if has_changed or chunks.finishes or time.monotonic() - self._stats_sent_s >= _STATS_EVERY_S:
            self._stats_sent_s = time.monotonic()
            self._send_stats()

    def _send_stats(self) -> None:
        self._pipe.send(engine_stats(self._built, len(self._preparing)))

    def _send_kv_events(self) -> None:
        for event in self._built.store.take_events():
            self._blocks.tier_changed(self._media[event.tier], event.stored, event.removed)
            self._built.stored_blocks.update(event.stored, event.removed)
        if changes := self._blocks.take():
            self._pipe.send(KvEvents(events=changes))


class _ProgressReports:
    """Sends the progress of a start to the server, at most every _PROGRESS_EVERY_S."""

    def __init__(self, pipe: EngineEnd) -> None:
        self._pipe = pipe
        self._sent_s = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - self._sent_s > _PROGRESS_EVERY_S:
            self._sent_s = now
            self._pipe.send(LoadProgress(stage=stage, done=done, total=total))


def prepare_device(name: str) -> None:
    """Make this process's context on a GPU and load cuBLAS, which takes seconds. A CPU needs no preparation."""
    device = torch.device(name)
    if device.type == "cuda":
        small = torch.zeros(16, 16, device=device)
        _ = small @ small
        torch.cuda.synchronize(device)


def serve(pipe: EngineEnd, arguments: EngineArguments, ahead: WeightReadAhead, timeline: Timeline) -> None:
    """Build the engine, report it to the server, and run the loop until the server ends it."""
    progress = LoopProgress()
    with Heartbeat(pipe, progress):  # also while the model is loaded
        built = _build(pipe, arguments, ahead, timeline)
        if built is None:
            return
        engine, blocks, mailbox, ranks = built
        garbage.tune_for_serving()
        pipe.send(engine_info(engine))
        log_memory(engine.memory)
        log.event("kernels", **asdict(engine.kernels))
        shown = timeline if arguments.timeline_origin_s is not None else None
        if shown is not None:
            shown.log_to(log)
        engine.store.announce_held_blocks()
        ranks.has_started = True
        try:
            EngineLoop(engine, blocks, mailbox, pipe, progress, shown).run()
        except RankLost as lost:
            _end_process(lost)
        finally:
            engine.close()


def _build(
    pipe: EngineEnd, arguments: EngineArguments, ahead: WeightReadAhead, timeline: Timeline
) -> tuple[BuiltEngine, BlockLog, Mailbox, _LostRanks] | None:
    """Build the engine. If that fails, tell the server why and return None."""
    folder, lost_ranks = Path(arguments.folder), _LostRanks()
    ranks = arguments.settings.ranks
    try:
        family = family_of(read_hf_config(folder), str(folder))
        grammars = LazyGrammars(folder, family.shape.vocab_size)
        blocks = BlockLog()
        mailbox = Mailbox(pipe, grammars)
        built = build_engine(
            folder,
            arguments.settings,
            grammars=grammars,
            observer=blocks if arguments.kv_events else None,
            progress=_ProgressReports(pipe),
            timeline=timeline,
            ahead=ahead,
            tuning_dir=None if arguments.tuning_dir is None else Path(arguments.tuning_dir),
            wake=mailbox.wake,
            has_urgent=mailbox.has_urgent,
            kernel_cache_dir=Path(arguments.kernel_cache_dir) if arguments.kernel_cache_dir is not None else None,
            ranks=RankProcesses(lost_ranks) if ranks.tp * ranks.pp > 1 else None,
        )
    except StokerError as error:
        pipe.send(StartFailed(code=error.code, message=error.message))
        return None
    return built, blocks, mailbox, lost_ranks


class _LostRanks:
    """Ends this process when a rank is lost while it serves. At the start, building the engine fails with the reason."""

    def __init__(self) -> None:
        self.has_started = False

    def __call__(self, lost: RankLost) -> None:
        if self.has_started:
            _end_process(lost)


def _end_process(lost: RankLost) -> None:
    """End at once: the loop may wait for the lost rank. The server answers the open requests and starts a new engine."""
    log.error("engine_ends", reason=lost.message)
    os._exit(1)

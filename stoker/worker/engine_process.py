"""The engine's process: a mailbox in front of one Engine. Started by service.py with a socket and its settings."""

from __future__ import annotations

import gc
import os
import queue
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from stoker.base import log as logs
from stoker.base.errors import InvalidRequest, StokerError
from stoker.engine.build import BuiltEngine, build_engine, read_hf_config
from stoker.models.contract import family_of
from stoker.proto.messages import (
    Add,
    Cancel,
    Chunks,
    EngineArguments,
    EngineInfo,
    EngineStats,
    KvEvents,
    LoadProgress,
    Shutdown,
    StartFailed,
    ToEngine,
)
from stoker.proto.pipe import EngineEnd, FrameEnd
from stoker.sched.request import GenerateRequest, GrammarSpec
from stoker.text.tokenizer import Tokenizer
from stoker.worker.block_log import BlockLog
from stoker.worker.grammar import XGrammars

_STATS_EVERY_S = 0.25
_PROGRESS_EVERY_S = 0.1
_COMPILERS = 4

log = logs.EventLog("engine")


def _give_way() -> None:
    """This thread runs when the engine's own does not want the core. (On Linux a thread has a niceness of its own.)"""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


class Prepared(msgspec.Struct, frozen=True):
    """A grammar that has been compiled, or could not be."""

    spec: GrammarSpec
    error: InvalidRequest | None


class Mailbox:
    """Reads the pipe on a thread, so that the server never waits for a step; grammars are compiled on others."""

    def __init__(self, pipe: EngineEnd, grammars: XGrammars) -> None:
        self._pipe = pipe
        self._grammars = grammars
        self._messages: queue.SimpleQueue[ToEngine | Prepared] = queue.SimpleQueue()
        # Several, for a schema may take seconds and must not hold up the simple ones behind it.
        self._compilers = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="grammar", initializer=_give_way)
        self._compilers.submit(grammars.warm_up)
        threading.Thread(target=self._read, name="mailbox", daemon=True).start()

    def take(self, wait: bool) -> list[ToEngine | Prepared]:
        messages = []
        if wait:
            messages.append(self._messages.get())
        while not self._messages.empty():
            messages.append(self._messages.get())
        return messages

    def prepare(self, spec: GrammarSpec) -> None:
        """A Prepared will follow."""
        self._compilers.submit(self._prepare, spec)

    def _prepare(self, spec: GrammarSpec) -> None:
        try:
            self._grammars.prepare(spec)
            self._messages.put(Prepared(spec, None))
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


class EngineLoop:
    def __init__(self, built: BuiltEngine, blocks: BlockLog, mailbox: Mailbox, pipe: EngineEnd) -> None:
        self._built = built
        self._engine = built.engine
        self._mailbox = mailbox
        self._pipe = pipe
        self._blocks = blocks
        self._preparing: dict[GrammarSpec, list[GenerateRequest]] = {}  # who waits for it
        self._stats_at_s = 0.0

    def run(self) -> None:
        while True:
            idle = not self._engine.has_work
            if idle:
                self._pipe.send(self._stats())
            for message in self._mailbox.take(wait=idle):
                if isinstance(message, Shutdown):
                    return
                self._handle(message)
            chunks = self._engine.step()
            if chunks:
                self._pipe.send(Chunks(chunks=chunks))
            if changes := self._blocks.take():
                self._pipe.send(KvEvents(events=changes))
            now = time.monotonic()
            if now - self._stats_at_s >= _STATS_EVERY_S:
                self._stats_at_s = now
                self._pipe.send(self._stats())

    def _handle(self, message: ToEngine | Prepared) -> None:
        match message:
            case Add(request=request):
                self._add(request)
            case Prepared(spec=spec, error=error):
                for request in self._preparing.pop(spec):
                    if error is None:
                        self._engine.add(request)
                    else:
                        self._engine.refuse(request, error)
            case Cancel(request_id=request_id):
                for waiting in self._preparing.values():
                    waiting[:] = [request for request in waiting if request.request_id != request_id]
                self._engine.cancel(request_id)

    def _add(self, request: GenerateRequest) -> None:
        spec = request.sampling.grammar
        if spec is None:
            self._engine.add(request)
        elif spec in self._preparing:
            self._preparing[spec].append(request)
        else:
            self._preparing[spec] = [request]
            self._mailbox.prepare(spec)

    def _stats(self) -> EngineStats:
        scheduler, pool, counters = self._built.scheduler, self._built.pool, self._built.scheduler.counters
        return EngineStats(
            waiting_sequences=scheduler.num_waiting + sum(map(len, self._preparing.values())),
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
        )


def serve(pipe: EngineEnd, arguments: EngineArguments) -> None:
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
        grammars = XGrammars(Tokenizer.from_folder(folder), family.shape.vocab_size)
        blocks = BlockLog()
        observer = blocks if arguments.kv_events else None
        built = build_engine(folder, arguments.settings, grammars=grammars, observer=observer, progress=progress)
    except StokerError as error:
        pipe.send(StartFailed(code=error.code, message=error.message))
        return
    settings = built.settings
    # Everything made so far lives as long as the process: the collector need never look at it again.
    gc.collect()
    gc.freeze()
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
        )
    )
    EngineLoop(built, blocks, Mailbox(pipe, grammars), pipe).run()


def main() -> None:
    # Ctrl-C reaches the whole process group; the server decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    arguments = msgspec.json.decode(sys.argv[2].encode(), type=EngineArguments)
    logs.set_up(arguments.log_level)
    pipe = EngineEnd(socket.socket(fileno=int(sys.argv[1])))
    try:
        serve(pipe, arguments)
    except FrameEnd:
        return


if __name__ == "__main__":
    main()

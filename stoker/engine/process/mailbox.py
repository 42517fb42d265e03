"""Mailbox: the engine process's incoming messages, and the threads that prepare requests for the engine."""

from __future__ import annotations

import os
import queue
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import msgspec

from stoker.base import log as logs
from stoker.base.allowance import usable_cores
from stoker.base.errors import InvalidRequest
from stoker.engine.process.grammars.compile_cost import is_cheap_to_compile
from stoker.engine.process.grammars.compile_queue import CompileJob, FairCompilers
from stoker.engine.process.grammars.lazy_grammars import LazyGrammars
from stoker.kv.store.kv_store import KvStore
from stoker.proto.messages import Add, ToEngine
from stoker.proto.pipe import EngineEnd, FrameEnd
from stoker.sched.request import GenerateRequest, GrammarSpec

_CHEAP_COMPILERS, _MAX_SLOW_COMPILERS = 4, 8
_LOOKUP_THREADS = 2

log = logs.EventLog("engine")


class GrammarCompiled(msgspec.Struct, frozen=True):
    """A grammar is compiled, or could not be."""

    spec: GrammarSpec
    error: InvalidRequest | None
    compiled: object = None  # kept alive while a request needs it, so that it is not compiled again


class StoreLookedUp(msgspec.Struct, frozen=True):
    """The result of a store lookup: `num_blocks` leading blocks of the request are worth loading."""

    request: GenerateRequest
    num_blocks: int


class WakeUp(msgspec.Struct, frozen=True):
    """Another thread has a result for the engine, which should take a step."""


MailboxMessage = ToEngine | GrammarCompiled | StoreLookedUp | WakeUp


class Mailbox:
    """Reads the pipe on a thread of its own, so that the server never waits for a step.

    Grammars are compiled and the store is queried on other threads. Their results arrive as messages, too.
    """

    def __init__(self, pipe: EngineEnd, grammars: LazyGrammars) -> None:
        self._pipe = pipe
        self._grammars = grammars
        self._messages: queue.SimpleQueue[MailboxMessage] = queue.SimpleQueue()
        self._has_wake_up = threading.Event()  # a WakeUp is in the queue; one is enough
        self._has_urgent = threading.Event()  # an interactive request may be in the queue
        # Two pools: a grammar that needs a trial may take minutes, and must not delay the cheap ones. Such grammars use
        # at most half of the cores.
        num_slow = min(_MAX_SLOW_COMPILERS, max(2, usable_cores() // 2))
        self._cheap_compilers = FairCompilers(_CHEAP_COMPILERS, _lower_priority)
        self._slow_compilers = FairCompilers(num_slow, _lower_priority)
        self._lookups = ThreadPoolExecutor(_LOOKUP_THREADS, "kv-lookup")
        threading.Thread(target=self._read, name="mailbox", daemon=True).start()

    def warm_up_grammars(self) -> None:
        """Import xgrammar and read the vocabulary, which takes seconds, before the first request needs them."""
        self._cheap_compilers.submit("", CompileJob(lambda _: self._grammars.warm_up()))

    def take(self, wait: bool, timeout_s: float | None = None) -> list[MailboxMessage]:
        """Return all queued messages. With `wait`, wait for the first one up to `timeout_s`."""
        messages: list[MailboxMessage] = []
        self._has_urgent.clear()  # before the queue is read: a request that arrives now may set it in vain, but is not missed
        if wait:
            with suppress(queue.Empty):
                messages.append(self._messages.get(timeout=timeout_s))
            self._has_urgent.clear()
        while not self._messages.empty():
            messages.append(self._messages.get())
        self._has_wake_up.clear()
        return messages

    def wake(self) -> None:
        """Wake the engine. Can be called from any thread."""
        if not self._has_wake_up.is_set():
            self._has_wake_up.set()
            self._messages.put(WakeUp())

    def has_urgent(self) -> bool:
        """Return True if an interactive request has arrived since the last `take`."""
        return self._has_urgent.is_set()

    def _put_request(self, message: Add | StoreLookedUp) -> None:
        self._messages.put(message)
        if not message.request.is_flex:
            self._has_urgent.set()

    def look_up(self, request: GenerateRequest, store: KvStore) -> None:
        """Query the store on another thread. A StoreLookedUp follows."""
        self._lookups.submit(self._look_up, request, store)

    def _look_up(self, request: GenerateRequest, store: KvStore) -> None:
        num_blocks = 0
        try:
            num_blocks = store.num_worth_loading(request.token_ids, request.cache_salt)
        except Exception:  # a tier may raise anything; the request must run without its blocks
            log.error("kv_lookup_failed", exc_info=True)
        self._put_request(StoreLookedUp(request, num_blocks))

    def compile(
        self, spec: GrammarSpec, tenant: str, job: CompileJob | None = None, *, is_urgent: bool = False
    ) -> CompileJob:
        """Compile a grammar on another thread. A GrammarCompiled follows, unless the job is cancelled before it starts.

        `is_urgent`: an interactive request waits for it. `job` is the compilation of this grammar that other requests wait for
        already. It then also waits in the queue of this tenant, and still runs only once.
        """
        compilers = self._cheap_compilers if is_cheap_to_compile(spec) else self._slow_compilers
        job = job or CompileJob(partial(self._compile, spec))
        job.is_urgent |= is_urgent
        compilers.submit(tenant, job)
        return job

    def _compile(self, spec: GrammarSpec, job: CompileJob) -> None:
        try:
            compiled = GrammarCompiled(spec, None, self._grammars.prepare(spec))
        except InvalidRequest as error:
            compiled = GrammarCompiled(spec, error)
        except Exception as error:  # a compiler may raise anything; the waiting requests must get an answer
            log.error("grammar_failed", exc_info=True, kind=spec.kind)
            compiled = GrammarCompiled(
                spec, InvalidRequest(f"the grammar cannot be compiled: {error}", code="invalid_grammar")
            )
        self._messages.put(compiled)
        if job.is_urgent:
            self._has_urgent.set()

    def _read(self) -> None:
        try:
            while True:
                message = self._pipe.receive()
                if isinstance(message, Add):
                    self._put_request(message)
                else:
                    self._messages.put(message)
        except FrameEnd:
            os._exit(0)  # the server has ended
        except msgspec.DecodeError:
            log.error("mailbox_broken", exc_info=True)
            os._exit(1)  # without a reader the process would look healthy but get no requests; the server restarts it


def _lower_priority() -> None:
    """Let this thread run only when the engine's thread leaves a core free. On Linux, each thread has its own nice
    value."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)

"""EngineLoop: requests cancelled before the engine has them leave nothing behind, here or on other workers.

Statistics are never older than the chunks that follow them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from tiny import make_tiny

from stoker.base.config import EngineSettings, KvSettings, StoreSettings
from stoker.base.errors import InvalidRequest
from stoker.base.ids import RequestId
from stoker.engine.build import BuiltEngine, build_engine
from stoker.engine.process.block_log import BlockLog
from stoker.engine.process.grammars.compile_queue import CompileJob
from stoker.engine.process.heartbeat import LoopProgress
from stoker.engine.process.mailbox import GrammarCompiled, Mailbox, MailboxMessage, StoreLookedUp, WakeUp
from stoker.engine.process.main import EngineLoop
from stoker.kv.blocks.transfer import KvTicket
from stoker.kv.store.kv_store import KvStore
from stoker.proto.messages import Add, Cancel, Chunks, EngineStats, Shutdown
from stoker.sched.request import GenerateRequest, GrammarSpec, SamplingParams

TICKET = KvTicket("engine", "127.0.0.1:9", "lease", 4, 30.0)
GRAMMAR = GrammarSpec("regex", "a+")


@dataclass
class ScriptedMailbox:
    """Delivers scripted messages, one per step. It records requests to other threads, and never answers them."""

    script: list[MailboxMessage]
    asked: list[object] = field(default_factory=list)
    compiles: bool = True  # True: compiling starts at once
    compiling: list[CompileJob] = field(default_factory=list)

    def take(self, wait: bool, timeout_s: float | None = None) -> list[MailboxMessage]:
        return [self.script.pop(0) if self.script else Shutdown()]

    def warm_up_grammars(self) -> None: ...

    def look_up(self, request: GenerateRequest, store: KvStore) -> None:
        self.asked.append(request.request_id)

    def compile(self, spec: GrammarSpec, tenant: str, job: object = None, *, is_urgent: bool = False) -> CompileJob:
        self.asked.append(spec)
        self.compiling.append(CompileJob(lambda _: None))
        if self.compiles:
            self.compiling[-1].set_running_or_notify_cancel()
        return self.compiling[-1]


@dataclass
class Pipe:
    sent: list[object] = field(default_factory=list)

    def send(self, message: object) -> None:
        self.sent.append(message)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuiltEngine]:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder, "llama", torch.float32)
    store = StoreSettings(host_gib=0.001)
    built = build_engine(folder, EngineSettings(device="cpu", num_threads=1, kv=KvSettings(8, 16), store=store))
    yield built
    built.close()


def request(name: str, grammar: GrammarSpec | None = None) -> GenerateRequest:
    return GenerateRequest(
        RequestId(name), [1, 2, 3, 4, 5], 4, SamplingParams(temperature=0.0, grammar=grammar), 2, ticket=TICKET
    )


LOOKED_UP, COMPILED = request("l"), request("c", GRAMMAR)


@pytest.mark.parametrize(
    "script",
    [
        [Add(request=LOOKED_UP), Cancel(request_id=LOOKED_UP.request_id), StoreLookedUp(LOOKED_UP, 0)],
        [Add(request=COMPILED), Cancel(request_id=COMPILED.request_id), GrammarCompiled(GRAMMAR, None)],
        [Add(request=COMPILED), GrammarCompiled(GRAMMAR, InvalidRequest("no")), Cancel(request_id=COMPILED.request_id)],
    ],
    ids=["looked up", "its grammar compiled", "its grammar rejected"],
)
def test_the_ticket_of_a_cancelled_request_is_released(
    built: BuiltEngine, script: list[MailboxMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[KvTicket] = []
    monkeypatch.setattr(KvStore, "release", lambda store, ticket: released.append(ticket))
    mailbox, pipe = ScriptedMailbox(list(script)), Pipe()
    EngineLoop(built, BlockLog(), mailbox, pipe, LoopProgress()).run()  # type: ignore[arg-type]
    assert len(mailbox.asked) == 1
    assert released == [TICKET]
    assert not built.scheduler.has_work
    finishes = [chunk.finish for message in pipe.sent if isinstance(message, Chunks) for chunk in message.chunks]
    assert all(finish is not None and finish.reason == "error" for finish in finishes)


class AllowAll:
    """Grammars and matchers that allow every token."""

    done = too_slow = False

    def matcher(self, spec: GrammarSpec, token_ids: list[int], max_tokens: int) -> AllowAll:
        return self

    def accept(self, token_id: int) -> bool:
        return True

    def fill(self, allowed: torch.Tensor) -> None:
        allowed.fill_(-1)

    def forced(self, max_tokens: int) -> list[int]:
        return []


ALONE = GenerateRequest(RequestId("a"), [1, 2, 3], 3, SamplingParams(temperature=0.0, grammar=GRAMMAR), 2)


@pytest.mark.parametrize(
    ("after", "is_open"),
    [([], True), ([Cancel(request_id=ALONE.request_id)], False), ([StoreLookedUp(ALONE, 0), *[WakeUp()] * 8], False)],
    ids=["open", "cancelled", "finished"],
)
def test_a_grammar_is_kept_while_its_request_is_open(
    built: BuiltEngine, after: list[MailboxMessage], is_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built.engine._runner._rows, "_grammars", AllowAll())
    compiled = object()
    mailbox, pipe = ScriptedMailbox([Add(request=ALONE), GrammarCompiled(GRAMMAR, None, compiled), *after]), Pipe()
    loop = EngineLoop(built, BlockLog(), mailbox, pipe, LoopProgress())  # type: ignore[arg-type]
    loop.run()
    assert loop._open_grammars == ({ALONE.request_id: compiled} if is_open else {})


def test_statistics_count_a_request_before_its_chunks_are_sent(built: BuiltEngine) -> None:
    asked = GenerateRequest(RequestId("counted"), [1, 2, 3, 4], 4, SamplingParams(temperature=0.0), 3)
    mailbox, pipe = ScriptedMailbox([Add(request=asked), StoreLookedUp(asked, 0), *[WakeUp()] * 8]), Pipe()
    generated = built.scheduler.counters.generated_tokens
    EngineLoop(built, BlockLog(), mailbox, pipe, LoopProgress()).run()  # type: ignore[arg-type]
    sent_before: list[EngineStats] = []  # the last statistics before each chunk
    for before, message in enumerate(pipe.sent):
        if isinstance(message, Chunks):
            sent_before.append([earlier for earlier in pipe.sent[:before] if isinstance(earlier, EngineStats)][-1])
    assert [stats.waiting_sequences + stats.running_sequences for stats in sent_before] == [1, 1, 0]
    assert sent_before[-1].generated_tokens == generated + 3


@dataclass
class IdleMailbox(ScriptedMailbox):
    """None in the script: no message arrives while the loop waits. Records each timeout, and the idle tasks that run."""

    scripted: list[MailboxMessage | None] = field(default_factory=list)
    waits: list[float | None] = field(default_factory=list)

    def take(self, wait: bool, timeout_s: float | None = None) -> list[MailboxMessage]:
        if not wait:
            return []
        self.waits.append(timeout_s)
        message = self.scripted.pop(0) if self.scripted else Shutdown()
        return [] if message is None else [message]

    def warm_up_grammars(self) -> None:
        self.asked.append("grammars")


def test_graphs_are_captured_only_while_idle(built: BuiltEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = iter([True, True, False])
    mailbox = IdleMailbox([], scripted=[WakeUp(), None, None, WakeUp(), None, None])

    def capture_next_graph() -> bool:
        mailbox.asked.append("capture")
        return next(captures)

    monkeypatch.setattr(built.engine, "capture_next_graph", capture_next_graph)
    EngineLoop(built, BlockLog(), mailbox, Pipe(), LoopProgress()).run()  # type: ignore[arg-type]
    assert mailbox.asked == ["capture"] * 3 + ["grammars"]
    # Once idle, one graph after the other. After a message, the engine must be idle again. At the end no task is left.
    assert mailbox.waits == [0.25, 0.25, 0.0, 0.0, 0.25, 2.0, None]


def test_a_grammar_without_waiting_requests_is_not_compiled(built: BuiltEngine) -> None:
    first, second = request("1", GRAMMAR), request("2", GRAMMAR)
    left = [Cancel(request_id=first.request_id), Cancel(request_id=second.request_id)]
    mailbox = ScriptedMailbox([Add(request=first), Add(request=second), *left, Add(request=first)], compiles=False)
    EngineLoop(built, BlockLog(), mailbox, Pipe(), LoopProgress()).run()  # type: ignore[arg-type]
    assert mailbox.asked == [GRAMMAR, GRAMMAR]
    assert [one.cancelled() for one in mailbox.compiling] == [True, False]


def test_a_grammar_is_compiled_if_another_request_waits_or_it_has_started(built: BuiltEngine) -> None:
    first, second = request("1", GRAMMAR), request("2", GRAMMAR)
    mailbox = ScriptedMailbox(
        [Add(request=first), Add(request=second), Cancel(request_id=first.request_id)], compiles=False
    )
    loop = EngineLoop(built, BlockLog(), mailbox, Pipe(), LoopProgress())  # type: ignore[arg-type]
    loop.run()
    assert not mailbox.compiling[0].cancelled()
    mailbox.compiling[0].set_running_or_notify_cancel()
    mailbox.script += [Cancel(request_id=second.request_id), Add(request=first), GrammarCompiled(GRAMMAR, None)]
    loop.run()
    assert mailbox.asked == [GRAMMAR, first.request_id]


class SlowPatterns:
    """Grammars whose patterns do not finish compiling before `let_go` is set."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def prepare(self, spec: GrammarSpec) -> object:
        if spec.kind != "json_schema" or "pattern" in spec.text:
            self.let_go.wait(60)
        return spec


class SilentPipe(Pipe):
    def receive(self) -> object:
        threading.Event().wait()
        raise AssertionError


def test_slow_patterns_do_not_delay_other_grammars() -> None:
    slow, plain = SlowPatterns(), GrammarSpec("json_schema", "{}")
    mailbox = Mailbox(SilentPipe(), slow)  # type: ignore[arg-type]
    try:
        for number in range(20):
            mailbox.compile(GrammarSpec("regex", f"(a{number})*"), "")
            mailbox.compile(GrammarSpec("json_schema", f'{{"type": "string", "pattern": "a{number}"}}'), "")
        mailbox.compile(plain, "")
        assert mailbox.take(wait=True, timeout_s=30) == [GrammarCompiled(plain, None, plain)]
    finally:
        slow.let_go.set()

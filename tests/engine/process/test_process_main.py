"""The engine's loop: requests given up before the engine has them leave nothing behind, at other workers neither; what is told
of the engine is never older than what is told of its requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest
import torch
from tiny import make_tiny

from stoker.base.config import EngineSettings, KvSettings, StoreSettings
from stoker.base.errors import InvalidRequest
from stoker.base.ids import RequestId
from stoker.engine.build import BuiltEngine, build_engine
from stoker.engine.process import main as engine_process
from stoker.engine.process.block_log import BlockLog
from stoker.engine.process.main import EngineLoop, Found, Message, Prepared, Wake
from stoker.kv.blocks.transfer import KvTicket
from stoker.kv.store.kv_store import KvStore
from stoker.proto.messages import Add, Cancel, Chunks, EngineStats, Shutdown
from stoker.sched.request import GenerateRequest, GrammarSpec, SamplingParams

TICKET = KvTicket("engine", "127.0.0.1:9", "lease", 4, 30.0)
GRAMMAR = GrammarSpec("regex", "a+")


@dataclass
class Mailbox:
    """Messages of a script, a step each; what is asked of other threads is never answered by itself."""

    script: list[Message]
    asked: list[object] = field(default_factory=list)
    compiles: bool = True  # at once; else that has yet to begin
    compiling: list[Future[None]] = field(default_factory=list)

    def take(self, wait: bool, timeout_s: float | None = None) -> list[Message]:
        return [self.script.pop(0) if self.script else Shutdown()]

    def warm_up(self) -> None: ...

    def look_up(self, request: GenerateRequest, store: KvStore) -> None:
        self.asked.append(request.request_id)

    def prepare(self, spec: GrammarSpec) -> Future[None]:
        self.asked.append(spec)
        self.compiling.append(Future())
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
        [Add(request=LOOKED_UP), Cancel(request_id=LOOKED_UP.request_id), Found(LOOKED_UP, 0)],
        [Add(request=COMPILED), Cancel(request_id=COMPILED.request_id), Prepared(GRAMMAR, None)],
        [Add(request=COMPILED), Prepared(GRAMMAR, InvalidRequest("no")), Cancel(request_id=COMPILED.request_id)],
    ],
    ids=["looked up", "its grammar compiled", "its grammar refused"],
)
def test_kv_that_is_not_pulled_after_all_is_given_back(
    built: BuiltEngine, script: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[KvTicket] = []
    monkeypatch.setattr(KvStore, "release", lambda store, ticket: given_back.append(ticket))
    mailbox, pipe = Mailbox(list(script)), Pipe()
    EngineLoop(built, BlockLog(), mailbox, pipe).run()  # type: ignore[arg-type]
    assert len(mailbox.asked) == 1
    assert given_back == [TICKET]
    assert not built.scheduler.has_work
    finishes = [chunk.finish for message in pipe.sent if isinstance(message, Chunks) for chunk in message.chunks]
    assert all(finish is not None and finish.reason == "error" for finish in finishes)


class AnythingGoes:
    """Grammars, and their matchers."""

    done = too_slow = False

    def matcher(self, spec: GrammarSpec, token_ids: list[int], max_tokens: int) -> AnythingGoes:
        return self

    def accept(self, token_id: int) -> bool:
        return True

    def fill(self, allowed: torch.Tensor) -> None:
        allowed.fill_(-1)


ALONE = GenerateRequest(RequestId("a"), [1, 2, 3], 3, SamplingParams(temperature=0.0, grammar=GRAMMAR), 2)


@pytest.mark.parametrize(
    ("after", "is_kept"),
    [([], True), ([Cancel(request_id=ALONE.request_id)], False), ([Found(ALONE, 0), *[Wake()] * 8], False)],
    ids=["open", "cancelled", "answered"],
)
def test_a_grammar_is_kept_while_its_request_is_open(
    built: BuiltEngine, after: list[Message], is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built.engine._runner._rows, "_grammars", AnythingGoes())
    kept = object()
    mailbox, pipe = Mailbox([Add(request=ALONE), Prepared(GRAMMAR, None, kept), *after]), Pipe()
    loop = EngineLoop(built, BlockLog(), mailbox, pipe)  # type: ignore[arg-type]
    loop.run()
    assert loop._kept_grammars == ({ALONE.request_id: kept} if is_kept else {})


def test_whoever_hears_of_a_request_finds_it_counted(built: BuiltEngine) -> None:
    asked = GenerateRequest(RequestId("counted"), [1, 2, 3, 4], 4, SamplingParams(temperature=0.0), 3)
    mailbox, pipe = Mailbox([Add(request=asked), Found(asked, 0), *[Wake()] * 8]), Pipe()
    generated = built.scheduler.counters.generated_tokens
    EngineLoop(built, BlockLog(), mailbox, pipe).run()  # type: ignore[arg-type]
    told: list[EngineStats] = []  # the last that was told before each chunk
    for before, message in enumerate(pipe.sent):
        if isinstance(message, Chunks):
            told.append([earlier for earlier in pipe.sent[:before] if isinstance(earlier, EngineStats)][-1])
    assert [stats.waiting_sequences + stats.running_sequences for stats in told] == [1, 1, 0]
    assert told[-1].generated_tokens == generated + 3


@dataclass
class QuietMailbox(Mailbox):
    """None in the script: nothing comes for as long as the loop waits. Notes how long that is, and what is done meanwhile."""

    scripted: list[Message | None] = field(default_factory=list)
    waits: list[float | None] = field(default_factory=list)

    def take(self, wait: bool, timeout_s: float | None = None) -> list[Message]:
        if not wait:
            return []
        self.waits.append(timeout_s)
        message = self.scripted.pop(0) if self.scripted else Shutdown()
        return [] if message is None else [message]

    def warm_up(self) -> None:
        self.asked.append("grammars")


def test_steps_are_captured_only_while_it_is_quiet(built: BuiltEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = iter([True, True, False])
    mailbox = QuietMailbox([], scripted=[Wake(), None, None, Wake(), None, None])

    def prepare_next() -> bool:
        mailbox.asked.append("capture")
        return next(captures)

    monkeypatch.setattr(built.engine, "prepare_next", prepare_next)
    EngineLoop(built, BlockLog(), mailbox, Pipe()).run()  # type: ignore[arg-type]
    assert mailbox.asked == ["capture"] * 3 + ["grammars"]
    # Once it is quiet, one after the other; after a message it has to be quiet again; then nothing is left to wait for.
    assert mailbox.waits == [0.25, 0.25, 0.0, 0.0, 0.25, 2.0, None]


def test_a_grammar_that_nobody_waits_for_any_more_is_not_compiled(built: BuiltEngine) -> None:
    first, second = request("1", GRAMMAR), request("2", GRAMMAR)
    left = [Cancel(request_id=first.request_id), Cancel(request_id=second.request_id)]
    mailbox = Mailbox([Add(request=first), Add(request=second), *left, Add(request=first)], compiles=False)
    EngineLoop(built, BlockLog(), mailbox, Pipe()).run()  # type: ignore[arg-type]
    assert mailbox.asked == [GRAMMAR, GRAMMAR]
    assert [one.cancelled() for one in mailbox.compiling] == [True, False]


def test_a_grammar_that_is_wanted_by_another_or_has_begun_is_compiled(built: BuiltEngine) -> None:
    first, second = request("1", GRAMMAR), request("2", GRAMMAR)
    mailbox = Mailbox([Add(request=first), Add(request=second), Cancel(request_id=first.request_id)], compiles=False)
    loop = EngineLoop(built, BlockLog(), mailbox, Pipe())  # type: ignore[arg-type]
    loop.run()
    assert not mailbox.compiling[0].cancelled()
    mailbox.compiling[0].set_running_or_notify_cancel()
    mailbox.script += [Cancel(request_id=second.request_id), Add(request=first), Prepared(GRAMMAR, None)]
    loop.run()
    assert mailbox.asked == [GRAMMAR, first.request_id]


class SlowExpressions:
    """A compiler that never ends with an expression while it is held."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def prepare(self, spec: GrammarSpec) -> object:
        if spec.kind != "json_schema" or "pattern" in spec.text:
            self.let_go.wait(60)
        return spec


class DeafPipe(Pipe):
    def receive(self) -> object:
        threading.Event().wait()
        raise AssertionError


def test_expressions_that_take_long_hold_up_no_other_grammar() -> None:
    slow, plain = SlowExpressions(), GrammarSpec("json_schema", "{}")
    mailbox = engine_process.Mailbox(DeafPipe(), slow)  # type: ignore[arg-type]
    try:
        for number in range(20):
            mailbox.prepare(GrammarSpec("regex", f"(a{number})*"))
            mailbox.prepare(GrammarSpec("json_schema", f'{{"type": "string", "pattern": "a{number}"}}'))
        mailbox.prepare(plain)
        assert mailbox.take(wait=True, timeout_s=30) == [Prepared(plain, None, plain)]
    finally:
        slow.let_go.set()

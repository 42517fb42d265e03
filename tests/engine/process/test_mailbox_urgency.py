"""The mailbox says when an interactive request waits for the engine: only then is a step of flex sequences ended."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
from waiting import LONG_S

from stoker.base.ids import RequestId
from stoker.engine.process.mailbox import GrammarCompiled, Mailbox, StoreLookedUp
from stoker.proto.messages import Add, Cancel
from stoker.sched.request import GenerateRequest, GrammarSpec, SamplingParams

GRAMMAR = GrammarSpec("regex", "a+")


class FakePipe:
    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def receive(self) -> Any:
        return self.messages.get()


class FakeGrammars:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.may_compile = threading.Event()

    def prepare(self, spec: GrammarSpec) -> str:
        assert self.may_compile.wait(LONG_S)
        return "compiled"


class EmptyStore:
    def num_worth_loading(self, token_ids: list[int], salt: str | None) -> int:
        return 0


def request(*, is_flex: bool) -> GenerateRequest:
    return GenerateRequest(RequestId("r"), [1, 2], 2, SamplingParams(), 1, is_flex=is_flex)


def taken(mailbox: Mailbox) -> Any:
    """Return the next message."""
    [message] = mailbox.take(wait=True, timeout_s=LONG_S)
    return message


@pytest.mark.parametrize("is_flex", [True, False])
def test_a_request_is_urgent_until_it_is_taken(is_flex: bool) -> None:
    pipe = FakePipe()
    mailbox = Mailbox(pipe, FakeGrammars())  # type: ignore[arg-type]
    pipe.messages.put(Cancel(request_id=RequestId("other")))
    assert isinstance(taken(mailbox), Cancel)
    assert not mailbox.has_urgent()
    mailbox.look_up(request(is_flex=is_flex), EmptyStore())  # type: ignore[arg-type]
    mailbox._lookups.shutdown(wait=True)
    assert mailbox.has_urgent() == (not is_flex)
    assert isinstance(taken(mailbox), StoreLookedUp)
    assert not mailbox.has_urgent()
    pipe.messages.put(Add(request=request(is_flex=is_flex)))
    assert isinstance(taken(mailbox), Add)


@pytest.mark.parametrize("joins_later", [True, False])
@pytest.mark.parametrize("is_urgent", [True, False])
def test_a_grammar_is_urgent_if_an_interactive_request_waits_for_it(is_urgent: bool, joins_later: bool) -> None:
    grammars = FakeGrammars()
    mailbox = Mailbox(FakePipe(), grammars)  # type: ignore[arg-type]
    job = mailbox.compile(GRAMMAR, "t", is_urgent=is_urgent and not joins_later)
    job.is_urgent |= is_urgent and joins_later
    grammars.may_compile.set()
    job.result(LONG_S)
    assert mailbox.has_urgent() == is_urgent
    assert isinstance(taken(mailbox), GrammarCompiled)
    assert not mailbox.has_urgent()

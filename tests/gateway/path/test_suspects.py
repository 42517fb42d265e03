"""Which request bodies are refused after workers crashed."""

from __future__ import annotations

from typing import Any, cast

import pytest

from stoker.base.ids import WorkerId
from stoker.gateway.api.client_body import EndpointKind, parse
from stoker.gateway.path.call import Call
from stoker.gateway.path.suspects import CrashingRequest, SuspectRequests, SuspectTrial, SuspectWaits

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


def call_of(text: str, tenant: str = "t") -> Call:
    nothing = cast(Any, None)
    body = parse(EndpointKind.CHAT, b'{"user": "%b"}' % text.encode())
    return Call(nothing, body, nothing, b"r", {}, (), 0.0, 1, nothing, tenant)


def begun(suspects: SuspectRequests, text: str, worker_id: WorkerId, now: float) -> SuspectTrial:
    call = call_of(text)
    call.worker_id = worker_id
    trial = suspects.begin(call, now)
    assert trial is not None
    return trial


def crash(suspects: SuspectRequests, trial: SuspectTrial, now: float) -> bool:
    worker_id = trial.call.worker_id
    assert worker_id is not None
    suspects.end(trial)
    return suspects.crashed(trial.call, 1, worker_id, trial, now)


def test_suspects_that_crash_together_must_run_alone_before_one_is_refused() -> None:
    suspects = SuspectRequests(600.0)
    for text in ("bad", "fine"):
        assert not suspects.crashed(call_of(text), 2, B, None, 0.0)
    bad, fine = begun(suspects, "bad", C, 1.0), begun(suspects, "fine", C, 1.0)
    assert not crash(suspects, bad, 2.0)
    assert not crash(suspects, fine, 2.1)
    fine = begun(suspects, "fine", A, 10.0)
    with pytest.raises(SuspectWaits) as waits:
        suspects.begin(call_of("bad"), 13.0)
    assert waits.value.retry_after_s == 7.0
    suspects.completed(fine)
    suspects.end(fine)
    assert suspects.begin(call_of("fine"), 14.0) is None, "it completed, so it is forgotten"
    bad = begun(suspects, "bad", A, 14.0)
    assert crash(suspects, bad, 15.0)
    with pytest.raises(CrashingRequest, match="4 workers"):
        suspects.begin(call_of("bad"), 16.0)
    assert suspects.begin(call_of("bad", tenant="u"), 16.0) is None
    assert suspects.begin(call_of("bad"), 616.0) is None
    assert not suspects.tenants


def test_a_body_that_must_run_alone_does_not_block_the_others_for_long() -> None:
    suspects = SuspectRequests(600.0)
    for text in ("one", "two"):
        suspects.crashed(call_of(text), 2, B, None, 0.0)
    for trial in [begun(suspects, "one", C, 1.0), begun(suspects, "two", C, 1.0)]:
        crash(suspects, trial, 2.0)
    begun(suspects, "one", A, 10.0)  # takes minutes
    begun(suspects, "two", B, 21.0)


def test_the_memory_is_bounded_for_each_tenant() -> None:
    suspects = SuspectRequests(600.0)
    suspects.crashed(call_of("first", "other"), 2, A, None, 0.0)
    for number in range(2000):
        suspects.crashed(call_of(f"body {number}"), 2, A, None, 0.0)
    assert suspects.begin(call_of("body 0"), 1.0) is None
    assert suspects.begin(call_of("body 1999"), 1.0) is not None
    assert suspects.begin(call_of("first", "other"), 1.0) is not None
    assert sum(len(bodies) for bodies in suspects.tenants.values()) == 257


def test_it_can_be_turned_off() -> None:
    suspects = SuspectRequests(0.0)
    suspects.crashed(call_of("bad"), 2, A, None, 0.0)
    assert not suspects.tenants

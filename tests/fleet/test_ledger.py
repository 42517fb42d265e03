from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.base.ids import WorkerId
from stoker.fleet.ledger import Charge, Ledger, Totals

A, B = WorkerId("a"), WorkerId("b")
ZERO = Totals(0, 0, 0, 0)


def give(ledger: Ledger, worker_id: WorkerId = A, tokens: int = 100, now: float = 0.0) -> Charge:
    return ledger.charge(worker_id, prefill_tokens=tokens, context_tokens=200, output_tokens=50, now=now)


def test_a_charge_is_returned_in_two_parts_each_once() -> None:
    ledger = Ledger()
    charge = give(ledger)
    assert ledger.totals() == Totals(100, 200, 50, 1)
    charge.first_token(1.0)
    charge.first_token(1.1)
    assert ledger.totals() == Totals(0, 200, 50, 1)
    charge.end(2.0)
    charge.end(2.1)
    charge.first_token(2.2)
    assert ledger.totals() == ZERO


def test_an_end_without_a_first_token_returns_all() -> None:
    ledger = Ledger()
    give(ledger).end(1.0)
    assert ledger.totals() == ZERO
    assert ledger.load(A, 1.0).queued_tokens == 0


def test_queued_tokens_drain_at_the_workers_rate_but_not_below_what_stands_behind_the_oldest() -> None:
    ledger = Ledger()
    first, second = give(ledger, tokens=1000), give(ledger, tokens=600)
    assert ledger.load(A, 0.0, 100.0).queued_tokens == 1600
    assert ledger.load(A, 4.0, 100.0).queued_tokens == 1200
    assert ledger.load(A, 60.0, 100.0).queued_tokens == 600, "slower than thought: the first is still not done"
    first.first_token(61.0)
    assert ledger.load(A, 61.0, 100.0).queued_tokens == 600
    second.first_token(61.0)
    assert ledger.load(A, 61.0, 100.0).queued_tokens == 0, "faster than thought"


def test_recent_work_decays_by_half() -> None:
    ledger = Ledger(recent_half_life_s=10.0)
    give(ledger).end(0.0)
    assert ledger.load(A, 10.0).recent_requests == pytest.approx(0.5)
    assert ledger.load(A, 20.0).recent_tokens == pytest.approx(25.0)


def test_a_newcomer_starts_level() -> None:
    ledger = Ledger()
    for _ in range(8):
        give(ledger).end(0.0)
    assert ledger.load(B, 0.0).recent_requests == 8


def test_a_worker_that_left_is_forgotten_when_its_last_charge_is_back() -> None:
    ledger = Ledger()
    charge = give(ledger)
    ledger.forget(A)
    assert ledger.totals().requests == 1
    charge.end(1.0)
    assert ledger.totals() == ZERO
    give(ledger, B)
    assert ledger.load(A, 1.0).requests == 0


@given(st.lists(st.tuples(st.sampled_from(["give", "first", "end", "forget"]), st.integers(0, 5)), max_size=60))
def test_whatever_happens_nothing_leaks(steps: list[tuple[str, int]]) -> None:
    ledger, charges, now = Ledger(), [], 0.0
    for act, number in steps:
        now += 0.5
        worker_id = WorkerId(f"w{number % 2}")
        if act == "give":
            charges.append(give(ledger, worker_id, tokens=number * 10, now=now))
        elif act == "forget":
            ledger.forget(worker_id)
        elif charges:
            charge = charges[number % len(charges)]
            charge.first_token(now) if act == "first" else charge.end(now)
        for name in ("w0", "w1"):
            load = ledger.load(WorkerId(name), now, 7.0)
            assert 0 <= load.queued_tokens <= load.prefill_tokens
    for charge in charges:
        charge.end(now)
    assert ledger.totals() == ZERO

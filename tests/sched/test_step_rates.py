"""The engine's measurement of its own speed."""

from __future__ import annotations

import pytest

from stoker.base.ids import Row
from stoker.sched.plan import Span, StepPlan
from stoker.sched.step_rates import StepRates


def step(*counts: int) -> StepPlan:
    spans = [Span(Row(i), 0, count, True) for i, count in enumerate(counts)]
    return StepPlan(spans, [0] * sum(counts))


def test_there_are_no_rates_before_the_first_step() -> None:
    rates = StepRates()
    assert (rates.prefill_tokens_per_s, rates.decode_step_s) == (None, None)


def test_prefill_and_decode_have_separate_rates() -> None:
    rates = StepRates()
    for _ in range(5):
        rates.record(step(1, 1, 1), 0.01)
        rates.record(step(96, 1, 1, 1, 1), 0.5)
        rates.record(step(3, 1, 1), 9.0)  # counts for neither rate
        rates.record(step(20, *[1] * 40), 9.0)
    assert rates.decode_step_s == pytest.approx(0.01)
    assert rates.prefill_tokens_per_s == pytest.approx(200)


def test_old_steps_count_less() -> None:
    rates = StepRates()
    for seconds in (1.0, 0.1):
        for _ in range(60):
            rates.record(step(100), seconds)
            rates.record(step(1), seconds)
    assert rates.prefill_tokens_per_s == pytest.approx(1000, rel=0.05)
    assert rates.decode_step_s == pytest.approx(0.1, rel=0.05)

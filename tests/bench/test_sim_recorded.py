"""The calibration from recorded engine runs gives back these runs."""

from __future__ import annotations

import pytest

from bench.gateway.sim_recorded import BATCHES, DECODE_CONTEXT, MODELS, recorded, recorded_worker


@pytest.mark.parametrize("shape", MODELS)
def test_recorded_steps_take_the_recorded_time(shape: str) -> None:
    step, model = recorded_worker(shape).step, MODELS[shape]
    for rows in BATCHES:
        step_ms = 1e3 * step.seconds(rows, rows, rows * DECODE_CONTEXT, 0.0)
        assert step_ms == pytest.approx(recorded("offline", model, f"decode step, batch {rows}"))
    longest_ms = 1e3 * step.seconds(8192, 1, 0, 8192 * 8193 / 2)
    assert longest_ms == pytest.approx(recorded("offline", model, "first token of an 8,192-token prompt"))
    prefill_s = step.seconds(8192, 2, 0, 8192 * 4097 / 2)
    assert 8192 / prefill_s == pytest.approx(recorded("offline", model, "prefill, 16 prompts of 4,096 tokens"))
    assert min(step.knot_s) > 0
    assert step.attention_s > 0

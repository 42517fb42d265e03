"""The scheduler counts what drafts gain: the time of steps with drafts, and what their tokens would have taken without."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from stoker.base.ids import RequestId
from stoker.kv.blocks.pool import BlockPool
from stoker.sched.draft_tape import DraftTape
from stoker.sched.drafting import NoDrafting
from stoker.sched.plan import StepResult
from stoker.sched.request import GenerateRequest, SamplingParams
from stoker.sched.scheduler import Scheduler
from stoker.sched.scheduler_config import SchedulerConfig
from stoker.sched.sequence import Sequence
from stoker.sched.step_costs import StepCosts

STEP_S = 0.01  # of any step: drafts are free


class ThreeDrafts(NoDrafting):
    """Drafts three tokens of each sequence in every second step."""

    def __init__(self) -> None:
        self._num_plans = 0

    def plan(self, seqs: list[Sequence], budget: int, costs: StepCosts) -> Mapping[Sequence, int]:
        self._num_plans += 1
        for seq in seqs:
            seq.tape = DraftTape(len(seq.token_ids), [7] * 3, "three")
        return {} if self._num_plans % 2 else dict.fromkeys(seqs, 3)


def test_the_time_of_steps_with_drafts_is_compared_with_that_of_their_tokens() -> None:
    scheduler = Scheduler(SchedulerConfig(4, 64, 4), BlockPool(64), ThreeDrafts())
    for number in range(2):
        prompt = [number + 1] * 9
        scheduler.add(GenerateRequest(RequestId(str(number)), prompt, len(prompt), SamplingParams(), 60))
    num_drafting = num_tokens = 0
    for _ in range(20):
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(StepResult([[7] * (1 + span.num_drafts) for span in plan.spans], STEP_S))
        num_drafting += plan.num_drafts > 0
        num_tokens += sum(1 + span.num_drafts for span in plan.spans) * (plan.num_drafts > 0)
    counters = scheduler.counters
    assert num_drafting == 10
    assert num_tokens == 80
    assert counters.draft_step_s == pytest.approx(num_drafting * STEP_S)
    # Two rows bring two tokens in a step without drafts.
    assert counters.undrafted_s == pytest.approx(num_tokens / 2 * STEP_S, rel=0.2)

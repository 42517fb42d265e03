"""Plans for a pipeline: a sequence in flight is not planned again, and its row waits for its step."""

from __future__ import annotations

import random

import pytest

from stoker.base.ids import RequestId
from stoker.kv.blocks.pool import BlockPool
from stoker.sched.plan import ON_DEVICE, StepPlan, StepResult
from stoker.sched.request import GenerateRequest, SamplingParams
from stoker.sched.scheduler import Scheduler, SchedulerConfig


def request(number: int, num_prompt: int = 3, max_new: int = 50) -> GenerateRequest:
    token_ids = [number] * num_prompt
    return GenerateRequest(RequestId(f"r{number}"), token_ids, num_prompt, SamplingParams(), max_new)


def result_of(plan: StepPlan) -> StepResult:
    return StepResult([[7] if span.samples else [] for span in plan.spans], 0.01)


@pytest.mark.parametrize("stages", [2, 3])
def test_plans_in_flight_share_the_decoding_sequences(stages: int) -> None:
    scheduler = Scheduler(SchedulerConfig(4, 64, 8, stages=stages), BlockPool(100))
    for number in range(6):
        scheduler.add(request(number))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(result_of(plan))
    plans = [scheduler.plan() for _ in range(stages)]
    rows = [[span.row for span in plan.spans] for plan in plans if plan is not None]
    assert [len(found) for found in rows] == [6 // stages] * stages
    assert len({row for found in rows for row in found}) == 6
    assert scheduler.plan() is None  # all of them are in flight
    assert all(token != ON_DEVICE for plan in plans if plan is not None for token in plan.token_ids)


def test_a_prompt_goes_on_while_its_chunks_are_in_flight() -> None:
    scheduler = Scheduler(SchedulerConfig(4, 8, 8, stages=2), BlockPool(100))
    scheduler.add(request(1, num_prompt=20))
    plans = [scheduler.plan() for _ in range(3)]
    assert [plan.spans[0].start for plan in plans if plan is not None] == [0, 8, 16]
    assert scheduler.plan() is None


def test_the_row_of_a_cancelled_sequence_is_free_after_its_step() -> None:
    scheduler = Scheduler(SchedulerConfig(4, 64, 1, stages=2), BlockPool(100))
    scheduler.add(request(1))
    scheduler.add(request(2))
    first = scheduler.plan()
    assert first is not None
    scheduler.cancel(RequestId("r1"))
    assert scheduler.plan() is None  # the only row still gets a token
    scheduler.commit(result_of(first))
    second = scheduler.plan()
    assert second is not None
    assert second.freed_rows == [first.spans[0].row] == [second.new_rows[0].row]


@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends_and_every_block_comes_back(seed: int) -> None:
    """Random arrivals, cancellations and preemptions, with as many plans in flight as there are stages."""
    rng, stages = random.Random(seed), 3
    pool = BlockPool(14)
    scheduler = Scheduler(SchedulerConfig(4, 10, 4, stages=stages), pool)
    flying: list[StepPlan] = []
    ended: set[str] = set()
    for number in range(300):
        if number < 40 and rng.random() < 0.7:
            one = request(number, rng.randint(1, 20), rng.randint(1, 15))
            scheduler.add(GenerateRequest(**{**_fields(one), "priority": rng.choice([0, 1])}))
        if rng.random() < 0.05:
            ended |= {chunk.request_id for chunk in scheduler.cancel(RequestId(f"r{rng.randrange(40)}"))}
        plan = scheduler.plan()
        if plan is not None:
            rows = {span.row for span in plan.spans if span.samples}
            assert rows.isdisjoint({span.row for other in flying for span in other.spans if span.samples})
            flying.append(plan)
        while flying and (plan is None or len(flying) > stages - 1):
            chunks = scheduler.commit(result_of(flying.pop(0)))
            ended |= {chunk.request_id for chunk in chunks if chunk.finish is not None}
            plan = plan or StepPlan([], [])  # one commit is enough if nothing was planned
        pool.check()
    assert not scheduler.has_work
    assert pool.num_free == pool.num_blocks
    assert scheduler.counters.preemptions


def _fields(one: GenerateRequest) -> dict[str, object]:
    return {
        name: getattr(one, name) for name in ("request_id", "token_ids", "num_prompt", "sampling", "max_new_tokens")
    }

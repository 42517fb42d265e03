"""Plans for a pipeline: a sequence in flight is not planned again, and its row waits for its step."""

from __future__ import annotations

import random
from collections import deque

import pytest

from stoker.base.ids import RequestId
from stoker.kv.blocks.pool import BlockPool
from stoker.sched.plan import ON_DEVICE, StepPlan, StepResult
from stoker.sched.request import GenerateRequest, SamplingParams
from stoker.sched.scheduler import Scheduler
from stoker.sched.scheduler_config import SchedulerConfig
from stoker.sched.step_budget import plans_in_flight


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


class VirtualPipeline:
    """The engine's loop over stages that take a time per step, per decoding sequence and per prompt token. The first stage
    launches a step, and samples after the last one."""

    BASE_S, DECODE_S, PROMPT_S, HEAD_PART = 0.3e-3, 8e-6, 10e-6, 0.15

    def __init__(self, stages: int, seed: int) -> None:
        self._rng, self._stages = random.Random(seed), stages
        config = SchedulerConfig(16, 2048, 128, stages=stages, target_itl_s=0.075)
        self._scheduler = Scheduler(config, BlockPool(50_000))
        self._free_s = [0.0] * stages
        self.busy: list[list[tuple[float, float]]] = [[] for _ in range(stages)]
        self._flying: deque[tuple[StepPlan, float, float]] = (
            deque()
        )  # with their launch and their end in the last stage
        self._now_s = self._last_s = 0.0

    def run(self, num_requests: int, per_s: float) -> float:
        """Run requests that arrive at random. Return when the last one has ended."""
        rng, arrivals, at_s = self._rng, deque[float](), 0.0
        for _ in range(num_requests):
            arrivals.append(at_s := at_s + rng.expovariate(per_s))
        while arrivals or self._scheduler.has_work:
            while arrivals and arrivals[0] <= self._now_s:
                arrivals.popleft()
                self._scheduler.add(request(len(arrivals), rng.randint(50, 2000), rng.randint(20, 200)))
            plan = self._scheduler.plan()
            if plan is not None:
                self._launch(plan)
            elif not self._flying:
                self._now_s = arrivals[0]
            most = plans_in_flight(self._stages) - 1 if plan is not None else len(self._flying) - 1
            while len(self._flying) > max(0, most):
                self._commit()
        return self._now_s

    def _step_s(self, plan: StepPlan) -> float:
        num_decodes = sum(span.count == 1 for span in plan.spans)
        step_s = self.BASE_S + num_decodes * self.DECODE_S + (plan.num_tokens - num_decodes) * self.PROMPT_S
        return step_s * self._rng.uniform(1.0, 1.1)

    def _launch(self, plan: StepPlan) -> None:
        launched_s, step_s = self._now_s, self._step_s(plan)
        self._now_s = end_s = self._work(0, self._now_s, step_s * (1 - self.HEAD_PART))
        for stage in range(1, self._stages):
            end_s = self._free_s[stage] = self._work(stage, max(end_s, self._free_s[stage]), step_s)
        self._flying.append((plan, launched_s, end_s))

    def _commit(self) -> None:
        plan, launched_s, end_s = self._flying.popleft()
        self._now_s = self._work(0, max(self._now_s, end_s), self._step_s(plan) * self.HEAD_PART)
        token_ids = [[7] if span.samples else [] for span in plan.spans]
        self._scheduler.commit(StepResult(token_ids, self._now_s - max(launched_s, self._last_s)))
        self._last_s = self._now_s

    def _work(self, stage: int, start_s: float, step_s: float) -> float:
        self.busy[stage].append((start_s, start_s + step_s))
        return start_s + step_s


@pytest.mark.parametrize("seed", [0, 1])
def test_the_stages_of_a_long_pipeline_are_rarely_idle(seed: int) -> None:
    """Eight stages with random arrivals. While rows fill up at the start, and empty at the end, there is less to do."""
    pipeline = VirtualPipeline(8, seed)
    end_s = pipeline.run(num_requests=400, per_s=400.0)
    first_s, last_s = 0.25 * end_s, 0.7 * end_s
    for stage, worked in enumerate(pipeline.busy):
        busy_s = sum(max(0.0, min(end, last_s) - max(start, first_s)) for start, end in worked)
        assert busy_s / (last_s - first_s) > 0.97, f"stage {stage}"


@pytest.mark.parametrize(("stages", "num_prompt", "ratio"), [(2, 2000, 1.23), (2, 16_000, 1.14), (8, 16_000, 1.3)])
def test_a_prompt_alone_keeps_all_stages_busy(stages: int, num_prompt: int, ratio: float) -> None:
    """`ratio` is the time over that of one stage for all tokens. A step has a fixed cost of 16 tokens, as on a CPU."""
    scheduler = Scheduler(SchedulerConfig(16, 2048, 8, stages=stages), BlockPool(2000))
    scheduler.add(request(1, num_prompt=num_prompt, max_new=1))
    sizes = []
    while (plan := scheduler.plan()) is not None:
        sizes.append(plan.num_tokens)
        scheduler.commit(result_of(plan))
    assert sum(sizes) == num_prompt
    times = [16 + size for size in sizes]
    assert sum(times) + (stages - 1) * max(times) < num_prompt * ratio


def _fields(one: GenerateRequest) -> dict[str, object]:
    return {
        name: getattr(one, name) for name in ("request_id", "token_ids", "num_prompt", "sampling", "max_new_tokens")
    }

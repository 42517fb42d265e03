"""The size of mixed steps: fitted step times, and the limit that follows from them, the queue and a goal."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from fake_device import FakeDevice

from bench.engine.step_size import SETUPS, run_batch, run_sessions, simulation
from bench.support.simulated_device import DEVICES, Simulation
from stoker.base.ids import RequestId
from stoker.kv.blocks.pool import BlockPool
from stoker.sched.request import GenerateRequest, SamplingParams
from stoker.sched.scheduler import Scheduler
from stoker.sched.scheduler_config import SchedulerConfig
from stoker.sched.step_costs import StepCosts, StepTimes
from stoker.sched.step_size import StepSize

GPU = StepCosts(fixed_s=4e-3, token_s=24e-6, row_s=30e-6)  # about an 8B model
MOE = StepCosts(fixed_s=15e-3, token_s=12e-6, row_s=20e-6)  # about a 30B model with 128 experts
CPU = StepCosts(fixed_s=0.02, token_s=7e-4, row_s=2e-4)


def time_of(costs: StepCosts, num_tokens: int, num_rows: int) -> float:
    return costs.fixed_s + costs.token_s * num_tokens + costs.row_s * num_rows


def measured(costs: StepCosts, target_itl_s: float, step_tokens: int = 8192) -> StepSize:
    """A controller that has seen prefill-only, mixed and decode-only steps."""
    step_size = StepSize(target_itl_s, step_tokens)
    for num_tokens, num_rows in [(step_tokens, 2), (step_tokens // 4, 40), *[(rows, rows) for rows in (1, 8, 64)]]:
        for _ in range(3):
            step_size.record(num_tokens, num_rows, time_of(costs, num_tokens, num_rows))
    return step_size


# ---- fitted step times


@pytest.mark.parametrize("costs", [GPU, CPU, StepCosts(0.015, 12e-6, 0.0), StepCosts(0.0, 1e-3, 0.0)])
def test_the_fit_finds_the_costs_of_a_linear_device(costs: StepCosts) -> None:
    found = measured(costs, 0.1).costs
    for num_tokens, num_rows in ((4096, 100), (200, 200), (16, 1), (1000, 30)):
        assert time_of(found, num_tokens, num_rows) == pytest.approx(time_of(costs, num_tokens, num_rows), rel=0.03)


def test_the_fit_tells_guesses_from_the_rest_of_a_step() -> None:
    step_size = measured(GPU, 0.1)
    for num_guesses in (0, 3, 5):
        for _ in range(3):
            step_size.record(40, 8, time_of(GPU, 40, 8) + num_guesses * 1e-3, num_guesses)
    assert step_size.costs.guess_s == pytest.approx(1e-3, rel=0.1)
    assert step_size.costs.fixed_s == pytest.approx(GPU.fixed_s, rel=0.1)


def test_without_measurements_all_costs_are_zero() -> None:
    for step_s in (0.0, -1.0, math.nan, math.inf, 5e-324, 1e308):  # not measured, or a clock that jumped
        times = StepTimes()
        times.record(100, 1, step_s)
        assert times.costs == StepCosts()


def test_one_prefill_is_explained_by_its_tokens() -> None:
    times = StepTimes()
    times.record(1000, 2, 0.1)
    assert times.costs.token_s == pytest.approx(1e-4, rel=0.03)


@pytest.mark.parametrize("seed", range(20))
def test_stalls_and_compilations_do_not_change_the_fit(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    times = StepTimes()
    for number in range(400):
        num_rows = rng.randint(1, 64)
        num_tokens = num_rows + rng.choice([0, 0, 0, 300, 2000, 8000])
        # The first step of all is a compilation, and each tenth step is a stall.
        outlier = 3.0 if not number or rng.random() < 0.1 else 0.0
        times.record(num_tokens, num_rows, time_of(GPU, num_tokens, num_rows) * rng.uniform(0.97, 1.03) + outlier)
    for num_tokens, num_rows in ((32, 32), (1000, 32), (4000, 50)):
        assert time_of(times.costs, num_tokens, num_rows) == pytest.approx(time_of(GPU, num_tokens, num_rows), rel=0.15)


def test_a_long_decode_phase_keeps_what_is_known_about_prefill() -> None:
    times = StepTimes()
    for _ in range(3):
        times.record(8192, 2, time_of(GPU, 8192, 2))
    for number in range(20_000):
        num_rows = 1 + number % 64
        times.record(num_rows, num_rows, time_of(GPU, num_rows, num_rows))
    assert times.costs.token_s == pytest.approx(GPU.token_s, rel=0.1)


def test_the_fit_follows_a_device_that_becomes_slower() -> None:
    times = StepTimes()
    for costs in (GPU, StepCosts(*(3 * cost for cost in GPU))):  # another process takes a share of the GPU
        for number in range(300):
            num_rows = 1 + number % 32
            num_tokens = num_rows + (1000 if number % 3 else 0)
            times.record(num_tokens, num_rows, time_of(costs, num_tokens, num_rows))
    assert time_of(times.costs, 1000, 20) == pytest.approx(3 * time_of(GPU, 1000, 20), rel=0.1)


# ---- the limit


@pytest.mark.parametrize("costs", [GPU, CPU])
def test_a_short_queue_gets_steps_that_meet_the_goal(costs: StepCosts) -> None:
    goal_s = 15 * costs.decode_s(16)
    limit = measured(costs, goal_s).limit(16, 500)
    assert 0.7 * goal_s <= time_of(costs, limit, 17) <= 1.03 * goal_s


def test_a_larger_goal_a_longer_queue_and_a_faster_device_never_give_smaller_steps() -> None:
    goals = (0.005, 0.02, 0.05, 0.075, 0.1, 0.3, 1.0, math.inf)
    queues = (1, 100, 3000, 30_000, 300_000, 10_000_000)
    for costs in (GPU, CPU):
        for num_decodes in (1, 30, 300):
            by_goal = {goal: [measured(costs, goal).limit(num_decodes, queue) for queue in queues] for goal in goals}
            for limits in by_goal.values():
                assert limits == sorted(limits)
            for limits_of_queue in zip(*by_goal.values(), strict=True):
                assert list(limits_of_queue) == sorted(limits_of_queue)
    faster = StepCosts(*(cost / 2 for cost in GPU))
    assert measured(faster, 0.05).limit(30, 100) > measured(GPU, 0.05).limit(30, 100)


def test_a_batch_load_gets_steps_in_which_decoding_takes_little_time() -> None:
    assert measured(MOE, 0.075).limit(40, 500_000) == 8192
    for costs, num_decodes in ((GPU, 200), (CPU, 8)):
        limit = measured(costs, 0.01).limit(num_decodes, 500_000)
        prompt_s, decode_s = costs.token_s * (limit - num_decodes), costs.decode_s(num_decodes)
        assert 6 * decode_s <= prompt_s <= 8.2 * decode_s


@pytest.mark.parametrize("queued_tokens", [10, 10_000, 10**9])
def test_no_queue_makes_a_step_longer_than_the_goal_and_nine_times_the_decoding(queued_tokens: int) -> None:
    slow = StepCosts(fixed_s=0.035, token_s=200e-6, row_s=50e-6)  # about a 70B model
    for costs in (GPU, MOE, CPU, slow):
        for goal_s in (0.02, 0.075, 0.5):
            for num_decodes in (1, 20, 200):
                limit = measured(costs, goal_s).limit(num_decodes, queued_tokens)
                longest_s = max(goal_s, 9 * costs.decode_s(num_decodes))
                assert time_of(costs, limit, num_decodes) <= 1.05 * longest_s


def test_an_unattainable_goal_leaves_prefill_its_share() -> None:
    slow = StepCosts(fixed_s=0.2, token_s=1e-3, row_s=1e-3)
    limit = measured(slow, 0.05, 4096).limit(100, 10)
    decode_s = slow.decode_s(100)
    assert 0.25 * decode_s <= slow.token_s * (limit - 100) <= 0.55 * decode_s


def test_every_limit_leaves_room_for_all_decodes_and_some_prompt_tokens() -> None:
    rng = random.Random(5)
    for _ in range(2000):
        costs = StepCosts(*(10 ** rng.uniform(-9, 1) for _ in range(3)))
        step_size = StepSize(10 ** rng.uniform(-5, 2), 8192)
        for _ in range(rng.randint(0, 6)):
            num_rows = rng.randint(1, 500)
            num_tokens = num_rows + rng.choice([0, rng.randint(0, 8192)])
            step_size.record(num_tokens, num_rows, time_of(costs, num_tokens, num_rows) * rng.uniform(0.1, 10))
        num_decodes = rng.randint(1, 512)
        limit = step_size.limit(num_decodes, rng.randint(0, 10**7))
        assert num_decodes + 16 <= limit <= 8192
        assert step_size.mixed_tokens == limit


def test_before_it_is_measured_a_step_is_not_much_larger_than_measured_ones() -> None:
    step_size = StepSize(10.0, 8192)
    assert step_size.limit(1, 8192) <= 2048 + 1
    for _ in range(3):
        step_size.record(3000, 1, 0.01)
    assert step_size.limit(1, 8192) == 8192


def test_no_goal_means_no_limit() -> None:
    assert StepSize(math.inf, 8192).limit(500, 1) == 8192


# ---- in the scheduler


def add(scheduler: Scheduler, name: str, num_prompt: int) -> None:
    token_ids = list(range(num_prompt))
    scheduler.add(GenerateRequest(RequestId(name), token_ids, num_prompt, SamplingParams(), 6, cache_salt=name))


def test_a_prompt_gets_whole_steps_until_a_sequence_decodes() -> None:
    scheduler = Scheduler(SchedulerConfig(4, 64, 8, "fake", target_itl_s=0.025), BlockPool(200))
    device = FakeDevice(200, 4, 8)

    def step() -> int:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(replace(device.run(plan), step_s=1e-3 * plan.num_tokens))
        return plan.num_tokens

    add(scheduler, "first", 100)
    assert [step(), step()] == [64, 36]
    add(scheduler, "second", 40)
    assert [step(), step()] == [24, 18]  # 23 and 17 tokens of the prompt, and one decoded token each


def test_all_sequences_decode_even_if_they_exceed_the_goal() -> None:
    scheduler = Scheduler(SchedulerConfig(4, 64, 8, "fake", target_itl_s=1e-6), BlockPool(200))
    device = FakeDevice(200, 4, 8)
    for number in range(6):
        add(scheduler, str(number), 5)
    counts = []
    while (plan := scheduler.plan()) is not None:
        counts.append(plan.num_tokens)
        scheduler.commit(replace(device.run(plan), step_s=1.0))
    assert counts == [30, 6, 6, 6, 6, 6]


# ---- simulated devices


def mixed_times(made: Simulation) -> list[float]:
    """The times of the mixed steps, without the first ones."""
    times = [
        step_s
        for plan, step_s in made.steps
        if plan.num_tokens > len(plan.spans) and any(span.count == 1 for span in plan.spans)
    ]
    return times[len(times) // 4 :]


@pytest.mark.parametrize("name", DEVICES)
def test_from_a_cold_start_a_steady_load_of_prompts_meets_the_goal(name: str) -> None:
    setup = next(setup for setup in SETUPS.values() if setup.device == name)
    on_gpu = setup.steps_ahead > 0
    setup = replace(setup, batch=(1, 64, 4000))
    made = simulation(setup, "goal", setup.target_itl_s)
    # One sequence decodes all the time. Prompts arrive one by one, each longer than a step can be.
    num_in = 8000 if on_gpu else 1000
    for number in range(8):
        made.add(_prompt(f"p{number}", num_in), number * (0.5 if on_gpu else 2.0))
    run_batch(made, setup)
    times = mixed_times(made)
    assert len(times) >= 8
    assert sorted(times)[len(times) // 2] <= 1.1 * setup.target_itl_s
    assert max(times) <= 1.6 * setup.target_itl_s
    assert sum(times) / len(times) >= 0.5 * setup.target_itl_s, "prefill is throttled more than the goal needs"


def _prompt(name: str, num_in: int) -> GenerateRequest:
    rng = random.Random(name)
    token_ids = [rng.randrange(1000) for _ in range(num_in)]
    return GenerateRequest(RequestId(name), token_ids, num_in, SamplingParams(), 2)


@pytest.mark.parametrize("name", SETUPS)
def test_a_batch_is_as_fast_as_with_the_largest_steps(name: str) -> None:
    count, num_in, num_out = SETUPS[name].batch
    setup = replace(SETUPS[name], batch=(min(count, 128), num_in, num_out // 2))
    walls = {}
    for policy in ("goal", "largest"):
        made = simulation(setup, policy, setup.target_itl_s if policy == "goal" else 0.0)
        run_batch(made, setup)
        walls[policy] = made.now_s
    assert walls["goal"] <= 1.03 * walls["largest"]


def test_sessions_wait_less_between_tokens_and_no_longer_for_the_first() -> None:
    setup = SETUPS["dense"]
    gaps_s, ttft_s = {}, {}
    for policy in ("goal", "largest"):
        made = simulation(setup, policy, setup.target_itl_s if policy == "goal" else 0.0)
        later = run_sessions(made, 48)
        gaps = sorted(gap for request in made.finished for gap in request.gaps_s)
        gaps_s[policy] = gaps[len(gaps) * 999 // 1000]
        ttft_s[policy] = sorted(request.ttft_s for request in later)[len(later) * 9 // 10]
    assert gaps_s["goal"] <= 0.6 * gaps_s["largest"]
    assert ttft_s["goal"] <= 1.15 * ttft_s["largest"]

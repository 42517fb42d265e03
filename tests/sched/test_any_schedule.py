"""The scheduler's main property: any schedule gives each sequence the tokens that it gets when it runs alone."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import replace

import pytest
from fake_device import VOCAB, FakeDevice, RandomDrafting, lone_run, random_pools, random_reaches, random_request

from stoker.kv.blocks.pool import BlockPool
from stoker.sched.plan import StepResult
from stoker.sched.request import TokenChunk
from stoker.sched.scheduler import Scheduler
from stoker.sched.scheduler_config import SchedulerConfig


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("seed", range(200))
def test_any_schedule_gives_each_sequence_the_tokens_of_running_alone(seed: int, drafts: bool, local: bool) -> None:
    """`local`: the model also has KV sets with a bounded reach, and no step may read a block that was released there."""
    print("seed", seed)
    rng = random.Random(seed)
    block_tokens = rng.choice([1, 2, 4, 16])
    num_blocks = rng.choice([max(2, 8 // block_tokens), max(3, 64 // block_tokens), 400 // block_tokens])
    max_rows = rng.choice([1, 2, 8])
    timing = random.Random(f"timing {seed}")  # the size of mixed steps follows from measured times
    target_itl_s = timing.choice([math.inf, 0.001, 0.05, 1.0])
    flex_step_s = timing.choice([math.inf, 0.001, 0.05]) if seed % 2 else math.inf
    config = SchedulerConfig(
        block_tokens, rng.choice([1, 3, 16, 128]), max_rows, "fake", target_itl_s=target_itl_s, flex_step_s=flex_step_s
    )
    steps_ahead = rng.choice([0, 1, 2])
    pool = BlockPool(num_blocks)
    sizes = random.Random(f"local {seed}")
    local_pools = random_pools(sizes, random_reaches(sizes) if local else [], block_tokens, num_blocks)
    drafting = RandomDrafting(random.Random(f"drafts {seed}")) if drafts else None
    scheduler = Scheduler(config, pool, drafting, local_pools)
    device = FakeDevice(num_blocks, block_tokens, max_rows, local_pools)
    shared = [rng.randrange(VOCAB) for _ in range(60)]
    to_come = deque(random_request(rng, i, num_blocks * block_tokens, shared) for i in range(rng.randint(1, 30)))
    flex = random.Random(f"flex {seed}")  # the others' random numbers stay the same
    flex_rate, num_interrupts = flex.choice([0.0, 0.5, 1.0]), 30
    to_come = deque(replace(request, is_flex=flex.random() < flex_rate) for request in to_come)
    requests = {request.request_id: request for request in to_come}
    answers: dict[str, list[int]] = {request_id: [] for request_id in requests}
    cancellable = rng.sample(list(requests), len(requests) // 5)  # not all, or a sequence that hangs would be cancelled
    finishes: dict[str, str] = {}
    launched: deque[StepResult] = deque()

    def take(chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            assert chunk.request_id not in finishes, "a chunk after the last one"
            answers[chunk.request_id] += chunk.token_ids
            if chunk.finish is not None:
                finishes[chunk.request_id] = chunk.finish.reason

    now = 0.0
    while to_come or scheduler.has_work:
        now += 1
        while to_come and rng.random() < 0.4:
            scheduler.add(to_come.popleft())
        if cancellable and rng.random() < 0.03:
            take(scheduler.cancel(rng.choice(cancellable)))
        take(scheduler.expire(now))
        plan = scheduler.plan()
        if plan is not None:
            assert 0 < plan.num_tokens <= config.step_tokens
            step_s = timing.choice([0.0, 0.001 * plan.num_tokens, 0.01 + 0.0001 * plan.num_tokens, 5.0])
            # Only steps that are launched one by one are interrupted, and each time an interactive request has arrived.
            if plan.is_interruptible and not steps_ahead and num_interrupts and flex.random() < 0.3:
                num_interrupts -= 1
                launched.append(device.interrupt(plan, flex))
            else:
                launched.append(replace(device.run(plan), step_s=step_s))
            limit = 0 if plan.runs_alone else steps_ahead
        while launched and (plan is None or len(launched) > limit):
            take(scheduler.commit(launched.popleft()))
        for each in (pool, *local_pools):
            each.check()
        assert now < 10_000, "the scheduler does not finish"

    assert set(finishes) == set(requests)
    assert all(each.num_free == each.num_blocks for each in (pool, *local_pools))
    assert scheduler.counters.accepted_draft_tokens <= scheduler.counters.draft_tokens
    print("drafts", scheduler.counters.draft_tokens, "accepted", scheduler.counters.accepted_draft_tokens)
    for request_id, request in requests.items():
        expected = lone_run(request)
        if finishes[request_id] in ("stop", "length"):
            assert answers[request_id] == expected
        else:
            assert finishes[request_id] in ("cancelled", "deadline")
            assert answers[request_id] == expected[: len(answers[request_id])]

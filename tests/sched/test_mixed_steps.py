"""Mixed steps are shorter than prefill-only steps."""

from __future__ import annotations

from test_any_schedule import FakeDevice

from stoker.base.ids import RequestId
from stoker.kv.blocks.pool import BlockPool
from stoker.sched.request import GenerateRequest, SamplingParams
from stoker.sched.scheduler import Scheduler, SchedulerConfig


def test_a_prompt_gets_whole_steps_until_a_sequence_decodes() -> None:
    scheduler = Scheduler(SchedulerConfig(4, 64, 8, "fake", mixed_tokens=16), BlockPool(200))
    device = FakeDevice(200, 4, 8)

    def add(name: str, num_prompt: int) -> None:
        token_ids = list(range(num_prompt))
        scheduler.add(GenerateRequest(RequestId(name), token_ids, num_prompt, SamplingParams(), 6, cache_salt=name))

    def step() -> int:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(device.run(plan))
        return plan.num_tokens

    add("first", 100)
    assert [step(), step()] == [64, 36]
    add("second", 40)
    assert [step(), step(), step()] == [16, 16, 11]  # 15, 15 and 10 tokens of the prompt, and one decoded token each


def test_all_sequences_decode_even_if_they_exceed_mixed_tokens() -> None:
    scheduler = Scheduler(SchedulerConfig(4, 64, 8, "fake", mixed_tokens=3), BlockPool(200))
    device = FakeDevice(200, 4, 8)
    for number in range(6):
        request = GenerateRequest(RequestId(str(number)), [number] * 5, 5, SamplingParams(), 6, cache_salt=str(number))
        scheduler.add(request)
    counts = []
    while (plan := scheduler.plan()) is not None:
        counts.append(plan.num_tokens)
        scheduler.commit(device.run(plan))
    assert counts == [30, 6, 6, 6, 6, 6]

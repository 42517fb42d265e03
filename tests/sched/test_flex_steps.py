"""Steps of flex sequences: what they leave to interactive prompts, how long they take, and what an interruption does."""

from __future__ import annotations

from dataclasses import replace

from fake_device import FakeDevice

from stoker.base.ids import RequestId
from stoker.kv.blocks.pool import BlockPool
from stoker.sched.plan import StepPlan, StepResult
from stoker.sched.request import GenerateRequest, SamplingParams, TokenChunks
from stoker.sched.scheduler import Scheduler
from stoker.sched.scheduler_config import SchedulerConfig

TOKEN_S = 1e-3


class FlexWorld:
    """A scheduler over a fake device whose steps take TOKEN_S for each token."""

    def __init__(self, num_blocks: int = 200) -> None:
        config = SchedulerConfig(4, 64, 8, "fake", target_itl_s=1.0, flex_step_s=0.02)
        self.scheduler = Scheduler(config, BlockPool(num_blocks))
        self.device = FakeDevice(num_blocks, 4, 8)
        self.now_s = 0.0

    def add(self, name: str, num_prompt: int, *, is_flex: bool = True, max_new: int = 6, priority: int = 0) -> None:
        prompt = GenerateRequest(
            RequestId(name), [1] * num_prompt, num_prompt, SamplingParams(), max_new, name, priority, is_flex=is_flex
        )
        self.scheduler.add(prompt)

    def plan(self) -> StepPlan:
        self.scheduler.expire(self.now_s)
        plan = self.scheduler.plan()
        assert plan is not None
        return plan

    def commit(self, plan: StepPlan) -> TokenChunks:
        step_s = TOKEN_S * plan.num_tokens
        self.now_s += step_s
        return self.scheduler.commit(replace(self.device.run(plan), step_s=step_s))

    def step(self) -> StepPlan:
        self.commit(plan := self.plan())
        return plan


def test_a_step_with_an_interactive_prompt_has_no_flex_sequences() -> None:
    world = FlexWorld()
    world.add("decodes", 4)
    world.step()
    world.add("waits", 10)
    world.add("interactive", 30, is_flex=False)
    plan = world.step()
    assert [span.count for span in plan.spans] == [30]
    assert not plan.is_interruptible
    assert len(world.step().spans) == 3, "beside a sequence that decodes, flex sequences run"


def test_flex_sequences_go_on_if_the_interactive_prompt_waits_for_their_blocks() -> None:
    world = FlexWorld(num_blocks=4)
    world.add("flex", 8, max_new=4)
    world.step()
    world.add("interactive", 12, is_flex=False, max_new=2)
    seen = 0
    while world.scheduler.has_work:
        world.step()
        seen += 1
        assert seen < 20
    assert world.scheduler.counters.preemptions == 0


def test_steps_of_flex_sequences_are_short_until_no_interactive_request_came_for_some_time() -> None:
    world = FlexWorld()
    world.add("first", 20, is_flex=False, max_new=2)
    while world.scheduler.has_work:
        world.step()
    world.add("flex", 150)
    plan = world.step()
    assert plan.runs_alone
    assert 16 <= plan.num_tokens <= 21
    world.now_s += 10.1
    plan = world.step()
    assert not plan.runs_alone
    assert plan.num_tokens == 64


def test_an_interrupted_sequence_returns_to_the_queue_with_what_earlier_steps_computed() -> None:
    world = FlexWorld()
    world.add("flex", 100)
    assert world.step().num_tokens == 64
    plan = world.plan()
    assert plan.is_interruptible
    assert not world.scheduler.commit(StepResult([[]], 0.0, is_interrupted=True))
    assert world.scheduler.num_waiting == 1
    world.device.run(replace(plan, spans=[], token_ids=[]))  # a device that was interrupted has changed its rows
    assert world.plan().num_tokens == 36

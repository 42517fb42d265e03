"""What the scheduler guarantees besides correct tokens: order, reuse of KV, and rejected requests."""

from __future__ import annotations

import pytest
from test_any_schedule import FakeDevice

from stoker.base.errors import InvalidRequest
from stoker.base.ids import RequestId
from stoker.kv.blocks.pool import BlockPool
from stoker.sched.request import (
    Finish,
    GenerateRequest,
    SamplingParams,
    TokenChunk,
    TokenChunks,
    TokenLogprobs,
    TokenUsage,
)
from stoker.sched.scheduler import Scheduler
from stoker.sched.scheduler_config import SchedulerConfig

BLOCK = 4


class World:
    """A scheduler on a fake device, driven step by step."""

    def __init__(self, num_blocks: int = 100, step_tokens: int = 64, max_rows: int = 8) -> None:
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(SchedulerConfig(BLOCK, step_tokens, max_rows, "fake"), self.pool)
        self._device = FakeDevice(num_blocks, BLOCK, max_rows)
        self.chunks: dict[str, list[TokenChunk]] = {}

    def add(self, name: str, token_ids: list[int], max_new: int = 4, **fields: object) -> None:
        self.chunks[name] = []
        request = GenerateRequest(RequestId(name), token_ids, len(token_ids), SamplingParams(), max_new, **fields)  # type: ignore[arg-type]
        self.scheduler.add(request)

    def step(self) -> list[str]:
        """Run one step. Return the requests that got a token."""
        plan = self.scheduler.plan()
        if plan is None:
            return []
        chunks = self.scheduler.commit(self._device.run(plan))
        for chunk in chunks:
            self.chunks[chunk.request_id].append(chunk)
        self.pool.check()
        return [chunk.request_id for chunk in chunks]

    def run(self) -> None:
        for _ in range(10_000):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the scheduler does not finish")

    def cached(self, name: str) -> int:
        usage = self.chunks[name][-1].usage
        assert usage is not None
        return usage.cached_tokens


def test_a_second_request_reuses_all_full_blocks_of_the_common_prefix() -> None:
    world = World()
    world.add("first", list(range(30)))
    world.run()
    world.add("same", list(range(30)))
    world.run()
    assert world.cached("same") == 28


@pytest.mark.parametrize("changed", range(30))
def test_a_changed_token_invalidates_its_block_and_later_ones_only(changed: int) -> None:
    world = World()
    world.add("first", list(range(30)))
    world.run()
    world.add("second", [*range(changed), 49, *range(changed + 1, 30)])
    world.run()
    assert world.cached("second") == min(changed // BLOCK * BLOCK, 28)


def test_tenants_with_different_salts_never_share() -> None:
    world = World()
    world.add("first", list(range(30)), cache_salt="one")
    world.run()
    world.add("second", list(range(30)), cache_salt="two")
    world.run()
    world.add("third", list(range(30)), cache_salt="one")
    world.run()
    assert (world.cached("second"), world.cached("third")) == (0, 28)


def test_the_next_turn_reuses_what_the_last_one_generated() -> None:
    world = World()
    world.add("turn 1", list(range(10)), max_new=20)
    world.run()
    answer = [token for chunk in world.chunks["turn 1"] for token in chunk.token_ids]
    world.add("turn 2", [*range(10), *answer, 1, 2, 3])
    world.run()
    # The last sampled token was never computed: 29 tokens have KV, 7 blocks are full.
    assert world.cached("turn 2") == 28


def test_sequences_with_the_same_prompt_compute_it_once() -> None:
    world = World(step_tokens=1000)
    for i in range(5):
        world.add(f"choice {i}", list(range(40)))
    world.run()
    counters = world.scheduler.counters
    assert [world.cached(f"choice {i}") for i in range(5)] == [0, 36, 36, 36, 36]
    assert counters.cached_tokens == 4 * 36
    # The last block is copied from the first sequence, so only the last token is computed again.
    assert counters.partial_tokens == 4 * 3


def test_a_better_priority_preempts_a_worse_one_for_blocks_and_rows() -> None:
    for world in (World(num_blocks=8), World(max_rows=1)):
        world.add("low", list(range(20)), max_new=10, priority=5)
        world.step()
        world.add("high", list(range(30, 50)), max_new=5, priority=-5)
        assert world.step() == ["high"]
        world.run()
        assert world.scheduler.counters.preemptions == 1
        assert [len(world.chunks[name]) for name in ("low", "high")] == [10, 5]


def test_equal_priorities_do_not_preempt_each_other() -> None:
    world = World(num_blocks=8)
    world.add("first", list(range(20)), max_new=10)
    world.step()
    world.add("second", list(range(30, 50)), max_new=5)
    assert world.step() == ["first"]
    world.run()
    assert world.scheduler.counters.preemptions == 0


def test_a_long_prompt_does_not_stall_decoding_sequences() -> None:
    world = World(step_tokens=8)
    world.add("short", [1, 2, 3], max_new=10)
    world.step()
    world.add("long", list(range(40)) * 2, max_new=1)
    for _ in range(8):
        assert "short" in world.step()


def test_a_request_that_can_never_fit_is_rejected_at_once() -> None:
    world = World(num_blocks=5)
    with pytest.raises(InvalidRequest) as refused:
        world.add("large", list(range(10)), max_new=11)
    assert refused.value.code == "kv_too_small"
    assert "21" in refused.value.message
    assert "20" in refused.value.message
    assert not world.scheduler.has_work


def test_a_token_id_outside_the_vocabulary_is_rejected() -> None:
    """Its embedding would be read out of bounds, which would end all requests."""
    scheduler = Scheduler(SchedulerConfig(4, 16, 2, vocab_size=50), BlockPool(8))
    with pytest.raises(InvalidRequest) as refused:
        scheduler.add(GenerateRequest(RequestId("r"), [3, 50, 4], 3, SamplingParams(), 5))
    assert refused.value.code == "unknown_token"
    assert not scheduler.has_work
    scheduler.add(GenerateRequest(RequestId("r"), [3, 49, 4], 3, SamplingParams(), 5))


def test_more_tokens_than_the_models_context_are_rejected() -> None:
    """Their rotary angles would be read out of bounds, which would end all requests."""
    scheduler = Scheduler(SchedulerConfig(4, 16, 2, max_tokens=10), BlockPool(8))
    with pytest.raises(InvalidRequest) as refused:
        scheduler.add(GenerateRequest(RequestId("r"), [1, 2, 3, 4, 5, 6], 6, SamplingParams(), 5))
    assert refused.value.code == "context_length_exceeded"
    assert "11" in refused.value.message
    assert "10" in refused.value.message
    assert not scheduler.has_work
    scheduler.add(GenerateRequest(RequestId("r"), [1, 2, 3, 4, 5, 6], 6, SamplingParams(), 4))


def test_the_first_and_the_last_chunk_have_usage() -> None:
    world = World(step_tokens=8)
    world.add("short", list(range(20)), max_new=1)
    world.add("long", list(range(30, 60)), max_new=5)
    world.run()
    (only,) = world.chunks["short"]
    assert only.usage == TokenUsage(20, 0, 1)
    assert [chunk.usage for chunk in world.chunks["long"]] == [
        TokenUsage(30, 0, 1),
        None,
        None,
        None,
        TokenUsage(30, 0, 5),
    ]


def test_iterating_over_chunks_returns_what_was_added() -> None:
    logprobs, finish = [TokenLogprobs(7, -0.5, [], [])], Finish("length")
    one, two = TokenChunks(), TokenChunks()
    one.add(RequestId("a"), [1], TokenUsage(3, 0, 1))
    one.add(RequestId("b"), [2])
    two.add(RequestId("c"), [7], None, logprobs)
    two.add(RequestId("d"), [], TokenUsage(4, 0, 0), None, finish)
    one.extend(two)
    assert list(one) == [
        TokenChunk(RequestId("a"), [1], TokenUsage(3, 0, 1)),
        TokenChunk(RequestId("b"), [2]),
        TokenChunk(RequestId("c"), [7], logprobs=logprobs),
        TokenChunk(RequestId("d"), [], TokenUsage(4, 0, 0), finish=finish),
    ]


def test_a_cancelled_sequence_releases_its_blocks_at_once() -> None:
    world = World()
    world.add("gone", list(range(30)), max_new=50)
    world.step()
    (chunk,) = world.scheduler.cancel(RequestId("gone"))
    assert chunk.finish is not None
    assert chunk.finish.reason == "cancelled"
    assert world.pool.num_free == world.pool.num_blocks
    assert not world.scheduler.cancel(RequestId("gone"))


def test_the_least_recently_used_prefix_is_evicted_first_from_its_end() -> None:
    world = World(num_blocks=12)
    world.add("old", list(range(16)), max_new=1)
    world.run()
    world.add("new", list(range(20, 36)), max_new=1)
    world.run()
    world.add("large", [40] * 23, max_new=1)  # takes 6 of 12 blocks, 8 of which have keys
    world.run()
    world.add("new again", list(range(20, 36)), max_new=1)
    world.run()
    assert world.cached("new again") == 12
    world = World(num_blocks=6)
    world.add("old", list(range(16)), max_new=1)
    world.run()
    world.add("other", [40] * 11, max_new=1)
    world.run()
    world.add("old again", list(range(16)), max_new=1)
    world.run()
    assert world.cached("old again") == 12

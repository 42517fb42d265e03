"""Layers with a bounded reach: what a sequence holds of them, and when an earlier prefix can be reused."""

from __future__ import annotations

import pytest
from fake_device import FakeDevice, lone_run

from stoker.base.ids import RequestId
from stoker.kv.blocks.pool import BlockPool
from stoker.kv.blocks.reach import KvReach, visible_prefix
from stoker.sched.request import GenerateRequest, SamplingParams
from stoker.sched.scheduler import Scheduler
from stoker.sched.scheduler_config import SchedulerConfig

BLOCK = 16
STEP = 256


class World:
    """A scheduler whose device computes each plan at once."""

    def __init__(self, *reaches: KvReach, num_blocks: int = 2048, num_local: int = 64) -> None:
        self.pool = BlockPool(num_blocks)
        self.local = [BlockPool(num_local, reach=reach) for reach in reaches]
        self.scheduler = Scheduler(SchedulerConfig(BLOCK, STEP, 4, "fake"), self.pool, None, self.local)
        self.device = FakeDevice(num_blocks, BLOCK, 4, self.local)
        self.most_held = [0] * len(self.local)

    def ask(self, token_ids: list[int], max_new_tokens: int = 4) -> int:
        """Answer a request, and return how many of its tokens were cached."""
        request = GenerateRequest(
            RequestId("r"), token_ids, len(token_ids), SamplingParams(temperature=0.0), max_new_tokens
        )
        self.scheduler.add(request)
        answer, cached = [], 0
        while self.scheduler.has_work:
            plan = self.scheduler.plan()
            held = [pool.num_blocks - pool.num_free for pool in self.local]
            self.most_held = [max(pair) for pair in zip(self.most_held, held, strict=True)]
            if plan is not None:
                for chunk in self.scheduler.commit(self.device.run(plan)):
                    answer += chunk.token_ids
                    cached = chunk.usage.cached_tokens if chunk.usage is not None else cached
        assert answer == lone_run(request)
        assert all(pool.num_free == pool.num_blocks for pool in (self.pool, *self.local))
        return cached


@pytest.mark.parametrize("reach", [KvReach("window", 128), KvReach("chunk", 128)])
def test_the_blocks_of_a_bounded_set_do_not_grow_with_the_context(reach: KvReach) -> None:
    most = []
    for num_tokens in (1024, 4096, 16384):
        world = World(reach)
        world.ask([i % 50 for i in range(num_tokens)])
        most.append(world.most_held[0])
    print("blocks held at 1k, 4k and 16k tokens:", most)
    assert len(set(most)) == 1
    assert most[0] <= reach.num_blocks(BLOCK) + STEP // BLOCK


def test_a_hit_in_the_middle_of_an_earlier_prompt_needs_its_window_there() -> None:
    """Blocks that a sequence has passed are found until they are reused. Those at its end are kept longer."""
    world = World(KvReach("window", 40), num_local=64)
    first = [i % 50 for i in range(320)]
    world.ask(first)
    assert world.ask(first[:160] + [7] * 100) == 160, "nothing was reused so far"
    for token in (6, 8, 9):  # each passes 20 blocks, which take the place of those that were passed before
        world.ask([token] * 320)
    assert world.ask(first[:80] + [7] * 100) == 0, "what was passed is gone"
    assert world.ask(first) == 304, "the end of an earlier prompt is found again"


@pytest.mark.parametrize(("extent", "count"), [(40, 6), (64, 8), (128, 8)])
def test_a_prefix_ends_where_its_chunk_is_whole(extent: int, count: int) -> None:
    """Blocks 6 and 7 are missing, and the prefix has at most 8. At a chunk border nothing before is needed."""
    reach = KvReach("chunk", extent)
    found = visible_prefix(8, BLOCK, [(reach, lambda i: i < 6)])
    assert found == count


def test_a_window_of_one_token_needs_no_earlier_block() -> None:
    reach = KvReach("window", 1)
    assert visible_prefix(5, BLOCK, [(reach, lambda i: False)]) == 5
    assert reach.first_block(5 * BLOCK, BLOCK) == 5


def test_a_partly_equal_block_is_copied_only_if_all_sets_have_it() -> None:
    world = World(KvReach("window", 8))
    token_ids = list(range(48))
    world.ask(token_ids)
    world.ask([*token_ids[:40], 49, 49])
    assert world.scheduler.counters.partial_tokens == 8
    world.local[0].release(world.local[0].take(world.local[0].num_free))  # evicts all of them
    world.ask([*token_ids[:40], 48, 48])
    assert world.scheduler.counters.partial_tokens == 8, "the window's part of the block was reused"


def test_a_pool_that_no_sequence_fits_into_is_refused() -> None:
    with pytest.raises(AssertionError):
        World(KvReach("window", 128), num_local=17)

"""Blocks of layers with a window are stored only where a later request may need them."""

from __future__ import annotations

from stoker.base.ids import RequestId
from stoker.kv.blocks.pool import BlockPool
from stoker.kv.blocks.reach import KvReach
from stoker.sched.plan import StepResult
from stoker.sched.request import GenerateRequest, SamplingParams
from stoker.sched.scheduler import Scheduler
from stoker.sched.scheduler_config import SchedulerConfig

BLOCK = 4
WINDOW = 8  # the token at position 4 * n sees a part of block n - 2, and block n - 1


def offered(scheduler: Scheduler, kv_set: int) -> list[list[int]]:
    """Return the tokens of the blocks that were newly offered in a KV set, and end the offers."""
    blocks = scheduler.take_offers()
    scheduler.end_offers(blocks)
    return [list(block.name.token_ids) for block in blocks if block.kv_set == kv_set]


def blocks_of(token_ids: list[int], *numbers: int) -> list[list[int]]:
    return [token_ids[BLOCK * number : BLOCK * (number + 1)] for number in numbers]


def answer(scheduler: Scheduler, name: str, prompt: list[int], num_tokens: int) -> tuple[list[int], list[list[int]]]:
    """Run a request alone. Return all of its tokens, and what was offered of the windows before its last step."""
    scheduler.add(GenerateRequest(RequestId(name), prompt, len(prompt), SamplingParams(), num_tokens))
    known, before = list(prompt), []
    while (plan := scheduler.plan()) is not None:
        known += [len(known)] * any(span.samples for span in plan.spans)
        if len(known) == len(prompt) + num_tokens:
            before = offered(scheduler, 1)
        scheduler.commit(StepResult([[known[-1]] if span.samples else [] for span in plan.spans], 0.01))
    return known, before


def test_only_what_a_later_request_may_need_of_a_window_is_offered() -> None:
    local = BlockPool(40, reach=KvReach("window", WINDOW))
    config = SchedulerConfig(BLOCK, 64, 4, max_offers=100)
    scheduler = Scheduler(config, BlockPool(1000), local_pools=[local])
    prompt = list(range(100, 140))
    known, before = answer(scheduler, "first", prompt, 17)
    assert before == blocks_of(prompt, 7, 8), "the last token of the prompt is computed again"
    assert offered(scheduler, 1) == blocks_of(known, 12, 13), "what follows the answer sees these"

    # Another prompt with the same first 24 tokens finds them in the set that keeps all tokens. Its window is computed again.
    other = prompt[:24] + list(range(200, 216))
    for number in range(20):  # the window's blocks are evicted
        answer(scheduler, "filler", [300 + number] * 60, 1)
    offered(scheduler, 1)
    computed = scheduler.counters.computed_tokens
    _, before = answer(scheduler, "second", other, 2)
    assert scheduler.counters.computed_tokens - computed >= len(other)
    assert before == blocks_of(other, 4, 5, 7, 8), "and stored, because prompts differ after it"
    computed = scheduler.counters.computed_tokens
    answer(scheduler, "third", prompt[:24] + list(range(400, 416)), 2)
    assert scheduler.counters.computed_tokens - computed < 20, "the shared text is found in both sets"
    offered(scheduler, 1)
    assert local.num_free == local.num_blocks

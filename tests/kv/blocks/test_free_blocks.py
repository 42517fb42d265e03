"""The order in which free blocks are reused."""

from __future__ import annotations

import random

from stoker.base.ids import BlockId, BlockKey
from stoker.kv.blocks.free_blocks import MATCHED_BONUS_S, FreeBlocks
from stoker.kv.blocks.pool import BlockPool


def free_blocks(*used: tuple[float, int, bool]) -> FreeBlocks:
    """Each: when it was used, which block, and whether a later request had found it."""
    free = FreeBlocks(0)
    for at, block, was_matched in used:
        free.add_named([BlockId(block)], at, was_matched=was_matched)
    return free


def order(free: FreeBlocks) -> list[int]:
    return [free.pop() for _ in range(len(free))]


def test_unnamed_blocks_are_reused_first_then_the_least_recently_used() -> None:
    free = free_blocks((1, 3, False), (2, 1, False), (3, 2, False))
    free.add_unnamed(BlockId(7))
    free.remove(BlockId(1))
    assert order(free) == [7, 3, 2]


def test_new_blocks_are_taken_after_returned_ones_and_before_those_with_a_name() -> None:
    free = FreeBlocks(4)
    assert [free.pop(), free.pop()] == [0, 1]
    assert [BlockId(i) in free for i in range(5)] == [False, False, True, True, False]
    free.add_named([BlockId(0)], 1.0, was_matched=False)
    free.add_unnamed(BlockId(1))
    assert len(free) == 4
    assert order(free) == [1, 2, 3, 0]


def test_a_block_that_was_matched_again_stays_longer_but_not_forever() -> None:
    later = MATCHED_BONUS_S
    used = [(0, 1, True), (later - 1, 2, False), (later + 1, 3, False), (later + 2, 4, True), (2 * later, 5, False)]
    assert order(free_blocks(*used)) == [2, 1, 3, 5, 4]


def test_blocks_are_reused_in_the_order_in_which_they_count_as_used() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng, now_s = random.Random(seed), 1000.0
    free, due = FreeBlocks(0), dict[BlockId, float]()
    for number in range(3000):
        now_s += rng.expovariate(1.0)
        block, was_matched = BlockId(number), rng.random() < 0.4
        free.add_named([block], now_s, was_matched=was_matched)
        due[block] = now_s + MATCHED_BONUS_S * was_matched
        if rng.random() < 0.3:
            gone = rng.choice(list(due))
            free.remove(gone)
            del due[gone]
        if len(free) > 200:
            first = free.pop()
            assert due.pop(first) <= min(due.values())
        assert len(free) == len(due)
        assert (BlockId(number) in free) == (BlockId(number) in due)


def test_a_block_that_a_request_found_outlives_newer_blocks() -> None:
    pool = BlockPool(4)
    names = [BlockKey(bytes([number] * 16)) for number in range(4)]

    def compute(number: int) -> None:
        [block] = pool.take(1)
        pool.name(block, names[number], BlockKey(bytes(16)), (number,))
        pool.release([block])
        pool.now_s += 1

    def find(number: int) -> None:
        found = pool.match([names[number]])
        pool.hold_matched(found)
        pool.release(found)
        pool.now_s += 1

    compute(0)
    compute(1)
    find(0)
    compute(2)
    compute(3)
    pool.release(pool.take(2))
    assert [len(pool.match([name])) for name in names] == [1, 0, 0, 1], "0 was found; 1 and 2 were used before 3"
    pool.check()
    pool.now_s += 2 * MATCHED_BONUS_S
    find(3)
    pool.release(pool.take(3))
    assert [len(pool.match([name])) for name in names] == [0, 0, 0, 1]
    compute(0)
    pool.now_s += 1
    compute(1)
    pool.release(pool.take(3))
    assert [len(pool.match([name])) for name in names[:2]] == [0, 0], (
        "a block that was named again counts as not found yet"
    )
    pool.check()

"""What the prefix cache must find as a drafter."""

from __future__ import annotations

import pytest

from stoker.kv.blocks.pool import BlockPool
from stoker.spec.drafter import build_drafter
from tests.spec.sequences import fill_pool, new_parts, new_sequence

TEXT = list(range(100, 117))  # four full blocks and one token


@pytest.mark.parametrize("num_known", range(1, 17))
def test_a_repeated_request_is_drafted_to_its_last_full_block(num_known: int) -> None:
    parts = new_parts()
    fill_pool(parts.pool, new_sequence(TEXT[:6], TEXT[6:]))
    again = new_sequence(TEXT[:num_known])
    assert build_drafter("cache", parts).propose(again, 64) == TEXT[num_known:16]


def test_a_partly_filled_block_must_agree() -> None:
    parts = new_parts()
    fill_pool(parts.pool, new_sequence(TEXT))
    drafter = build_drafter("cache", parts)
    assert drafter.propose(new_sequence([*TEXT[:4], TEXT[4]]), 64) == TEXT[5:16]
    assert drafter.propose(new_sequence([*TEXT[:4], 7]), 64) == []


def test_a_different_beginning_finds_nothing() -> None:
    parts = new_parts()
    fill_pool(parts.pool, new_sequence(TEXT))
    assert build_drafter("cache", parts).propose(new_sequence([7, *TEXT[1:8]]), 64) == []


def test_the_newest_continuation_wins() -> None:
    parts = new_parts()
    fill_pool(parts.pool, new_sequence([*TEXT[:4], 1, 2, 3, 4]))
    fill_pool(parts.pool, new_sequence([*TEXT[:4], 1, 2, 5, 6]))
    drafter = build_drafter("cache", parts)
    assert drafter.propose(new_sequence([*TEXT[:4], 1]), 64) == [2, 5, 6]
    assert drafter.propose(new_sequence([*TEXT[:4], 1, 2, 3]), 64) == [4]


def test_evicted_blocks_are_not_drafted() -> None:
    parts = new_parts(num_blocks=4)
    fill_pool(parts.pool, new_sequence(TEXT))
    again = new_sequence(TEXT[:5])
    drafter = build_drafter("cache", parts)
    assert drafter.propose(again, 64) == TEXT[5:16]
    parts.pool.release(parts.pool.take(2))  # evicts the last two blocks
    assert drafter.propose(again, 64) == TEXT[5:8]


def test_children_are_listed_newest_first() -> None:
    pool = BlockPool(8)
    first, second = new_sequence([1, 2, 3, 4]), new_sequence([5, 6, 7, 8])
    fill_pool(pool, first)
    fill_pool(pool, second)
    assert list(pool.children(first.root)) == [(second.keys[0], (5, 6, 7, 8)), (first.keys[0], (1, 2, 3, 4))]
    assert list(pool.children(first.keys[0])) == []

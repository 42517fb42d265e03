"""What the prefix cache must find as a drafter."""

from __future__ import annotations

import pytest

from stoker.kv.blocks.pool import BlockPool
from stoker.kv.blocks.transfer import BlockName
from stoker.sched.sequence import Sequence
from stoker.spec.drafter import build_drafter
from stoker.spec.stored_blocks import StoredBlocks
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


# ---- blocks in the tiers


def names_of(seq: Sequence) -> list[BlockName]:
    seq.extend_keys()
    return [seq.block_name(i) for i in range(len(seq.keys))]


def test_blocks_that_only_a_tier_holds_are_drafted() -> None:
    parts = new_parts()
    parts.stored.update(names_of(new_sequence(TEXT)), ())
    assert build_drafter("cache", parts).propose(new_sequence(TEXT[:6]), 64) == TEXT[6:16]


def test_a_chain_may_continue_in_a_tier() -> None:
    parts = new_parts(num_blocks=4)
    seq = new_sequence(TEXT)
    fill_pool(parts.pool, seq)
    parts.stored.update(names_of(seq), ())
    parts.pool.release(parts.pool.take(2))  # evicts the last two blocks from the pool
    assert build_drafter("cache", parts).propose(new_sequence(TEXT[:6]), 64) == TEXT[6:16]


def test_blocks_that_a_tier_has_removed_are_forgotten() -> None:
    parts = new_parts()
    names = names_of(new_sequence(TEXT))
    parts.stored.update(names, ())
    parts.stored.update((), [names[2].key, names[2].key])
    assert build_drafter("cache", parts).propose(new_sequence(TEXT[:6]), 64) == TEXT[6:8]


def test_another_salt_finds_nothing_in_a_tier() -> None:
    parts = new_parts()
    parts.stored.update(names_of(new_sequence(TEXT, salt="alice")), ())
    drafter = build_drafter("cache", parts)
    assert drafter.propose(new_sequence(TEXT[:6], salt="bob"), 64) == []
    assert drafter.propose(new_sequence(TEXT[:6], salt="alice"), 64) == TEXT[6:16]


def test_the_number_of_stored_blocks_is_bounded_and_the_newest_stay() -> None:
    stored = StoredBlocks(limit=3)
    names = [name for i in range(5) for name in names_of(new_sequence([i, 1, 2, 3]))]
    stored.update(names, ())
    stored.update(names[2:3], ())  # a second tier takes it too
    assert len(stored) == 3
    assert [token_ids[0] for _, token_ids in stored.children(names[0].parent)] == [2, 4, 3]
    off = StoredBlocks(limit=0)
    off.update(names, ())
    assert len(off) == 0

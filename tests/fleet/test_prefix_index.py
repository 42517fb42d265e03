from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.base.ids import WorkerId
from stoker.fleet.prefix_index import Key, Match, PrefixIndex

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


def depths(index: PrefixIndex, keys: list[Key]) -> dict[str, int]:
    return {worker_id: match.blocks for worker_id, match in index.match(keys).items()}


def test_a_match_counts_leading_blocks_up_to_the_first_missing_one() -> None:
    index = PrefixIndex()
    index.stored(A, [1, 2, 3, 4])
    index.stored(B, [1, 2])
    assert depths(index, [1, 2, 3, 4, 5]) == {A: 4, B: 2}
    index.removed(A, [2])
    assert depths(index, [1, 2, 3, 4, 5]) == {A: 1, B: 2}
    index.stored(A, [2])
    assert depths(index, [1, 2, 3, 4, 5]) == {A: 4, B: 2}, "only the removed block was missing, and it is back"
    assert depths(index, [9, 1]) == {}


def test_each_tier_counts_the_blocks_that_no_faster_tier_has() -> None:
    index = PrefixIndex()
    index.stored(A, [1, 2])
    index.stored(A, [1, 2, 3], "CPU")
    index.stored(A, [4, 5], "DISK")
    index.stored(B, [1], "CPU_PINNED")
    found = index.match([1, 2, 3, 4, 5, 6])
    assert found == {A: Match(2, 1, 2), B: Match(0, 1, 0)}
    index.removed(A, [1, 2])
    assert index.match([1, 2, 3, 4, 5, 6])[A] == Match(0, 3, 2), "gone from the device, still in RAM"


def test_blocks_of_a_shared_store_count_for_all_its_workers_and_are_kept_once() -> None:
    index = PrefixIndex()
    for worker in (A, B):
        index.share(worker, {"CPU": "ram", "DISK": "disk"})
    index.share(C, {"DISK": "another disk"})
    index.stored(A, [1])
    index.stored(A, [1, 2], "CPU")
    index.stored(B, [1, 2, 3], "DISK")
    index.stored(A, [3], "DISK")
    assert index.match([1, 2, 3, 4]) == {A: Match(1, 1, 1), B: Match(0, 2, 1)}
    assert len(index) == 1 + 2 + 3
    index.removed(B, [2], "CPU")
    assert index.match([1, 2, 3]) == {A: Match(1, 0, 2), B: Match(0, 1, 2)}, (
        "a block that one worker removes is gone for all"
    )


def test_a_store_is_kept_while_it_has_a_worker() -> None:
    index = PrefixIndex()
    index.share(A, {"CPU": "ram"})
    index.share(B, {"CPU": "ram"})
    index.stored(A, [1, 2, 3], "CPU")
    index.stored(A, [1])
    index.cleared(A)
    assert index.match([1, 2, 3]) == {A: Match(0, 3, 0), B: Match(0, 3, 0)}, "only its own blocks are dropped"
    index.forget(A)
    assert index.match([1, 2, 3]) == {B: Match(0, 3, 0)}
    index.cleared(B)
    assert index.match([1, 2, 3]) == {}, "the store's last worker will report its contents again"
    index.stored(B, [1], "CPU")
    index.share(B, {"CPU": "ram of another machine"})
    index.share(C, {"CPU": "ram"})
    assert index.match([1]) == {}
    assert len(index) == 0


def test_cleared_and_forgotten_workers_hold_nothing() -> None:
    index = PrefixIndex()
    index.stored(A, [1, 2])
    index.stored(A, [3], "DISK")
    index.stored(B, [1])
    index.cleared(A)
    assert depths(index, [1, 2, 3]) == {B: 1}
    assert len(index) == 1
    index.forget(B)
    assert depths(index, [1]) == {}
    assert len(index) == 0
    index.stored(WorkerId("c"), [1])
    assert depths(index, [1]) == {"c": 1}, "a new worker may reuse the bit"


def test_routed_blocks_are_assumed_stored_until_newer_ones_replace_them() -> None:
    index = PrefixIndex()
    index.set_capacity(A, 200)
    index.routed(A, list(range(100)), 0.0)
    index.routed(A, list(range(1000, 1100)), 1.0)
    index.routed(A, list(range(50)), 2.0)
    index.routed(A, list(range(2000, 2010)), 3.0)
    assert depths(index, list(range(50))) == {A: 50}, "recently used"
    assert depths(index, list(range(2000, 2010))) == {A: 10}
    assert depths(index, list(range(100)))[A] < 100, "the end of a conversation is evicted before its start"
    assert len(index) <= 200


def test_with_events_routed_blocks_are_assumed_stored_for_a_while() -> None:
    index = PrefixIndex(expected_s=30.0)
    index.stored(A, [1])
    index.routed(A, [1, 2, 3], 0.0)
    assert depths(index, [1, 2, 3]) == {A: 3}
    index.stored(A, [2])
    index.routed(A, [7], 30.0)
    assert depths(index, [1, 2, 3]) == {A: 2}, "no event confirmed the third block"


def test_the_index_knows_whether_new_blocks_evict_others() -> None:
    index = PrefixIndex()
    index.routed(A, range(100), 0.0)
    assert index.evicting == 1.0  # the evictions of A are not known
    index.stored(B, range(100))
    assert index.evicting == 0.0
    index.removed(B, range(50))
    assert index.evicting == 0.5
    index.removed(B, range(100))
    index.forget(A)
    assert index.evicting == 1.0
    for start in range(1000, 200_000, 1000):  # old counts decay
        index.stored(B, range(start, start + 1000))
    assert index.evicting < 0.01
    limited = PrefixIndex()
    limited.set_capacity(A, 100)
    limited.routed(A, range(100), 0.0)
    assert limited.evicting == 0.0
    limited.routed(A, range(1000, 1050), 0.0)
    assert limited.evicting > 0.3


def test_memory_is_bounded() -> None:
    index = PrefixIndex(max_entries=1000)
    index.share(C, {"DISK": "disk"})
    for start in range(0, 50_000, 100):
        index.routed(A if start % 200 else B, list(range(start, start + 100)), 0.0)
        index.stored(C, range(start, start + 100), "DISK")
    assert len(index) <= 1000
    assert len(index._masks[0]) <= 1000


@pytest.mark.parametrize("capacity", [None, 50_000])
def test_a_larger_index_drops_more_blocks_at_a_time(capacity: int | None) -> None:
    """Reaching the front of a large dict is slow. Dropping few blocks at a time would delay every request."""
    index = PrefixIndex(max_entries=50_000 if capacity is None else 1_000_000)
    index.set_capacity(A, capacity)
    index.routed(A, range(50_000), 0.0)
    assert len(index) == 50_000
    index.routed(A, range(50_000, 50_001), 0.0)
    assert 50_000 - 200 <= len(index) <= 50_000 - 90


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_the_index_agrees_with_a_simple_model(seed: int) -> None:
    rng, index = random.Random(seed), PrefixIndex()
    media = ("GPU", "CPU", "DISK")
    truth: dict[tuple[str, str], set[int]] = {(w, m): set() for w in "abc" for m in media}
    for sharer in rng.sample("abc", rng.choice((0, 2, 3))):
        index.share(WorkerId(sharer), {"DISK": "disk"})
        truth[sharer, "DISK"] = truth.setdefault(("", "DISK"), set())  # one set for all its workers
    for _ in range(rng.randint(1, 60)):
        worker, medium = rng.choice("abc"), rng.choice(media)
        keys = rng.sample(range(12), rng.randint(0, 8))
        act = rng.choice(("stored", "stored", "removed", "cleared"))
        if act == "stored":
            index.stored(WorkerId(worker), keys, medium)
            truth[worker, medium] |= set(keys)
        elif act == "removed":
            index.removed(WorkerId(worker), keys, medium)
            truth[worker, medium] -= set(keys)
        elif rng.random() < 0.2:
            index.cleared(WorkerId(worker))
            for each in media:
                if truth[worker, each] is not truth.get(("", "DISK")):
                    truth[worker, each].clear()
    chain = list(range(12))
    found = index.match(chain)
    for worker in "abc":
        have: set[int] = set()
        counts = []
        for medium in media:
            have |= truth[worker, medium]
            counts.append(next((at for at, key in enumerate(chain) if key not in have), len(chain)))
        expected = Match(counts[0], counts[1] - counts[0], counts[2] - counts[1])
        assert found.get(WorkerId(worker), Match()) == expected
    assert len(index) == sum(map(len, {id(keys): keys for keys in truth.values()}.values()))


def test_the_longest_holders_come_in_groups() -> None:
    index = PrefixIndex()
    index.stored(A, [1, 2, 3])
    index.stored(B, [1, 2])
    index.stored(WorkerId("c"), [1, 2])
    matches = index.match([1, 2, 3, 4])
    assert (matches.most_blocks, matches.num_longest, len(matches)) == (3, 1, 3)
    groups = list(matches.longest(2, few=1))
    assert [listed for listed, _ in groups] == [[A], []], "the second group has more than one worker"
    assert [groups[1][1](worker) for worker in (A, B, WorkerId("c"), WorkerId("d"))] == [False, True, True, False]
    assert [listed for listed, _ in matches.longest(1, few=5)] == [[A]]
    assert not index.match([9])

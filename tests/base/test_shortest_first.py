"""ShortestFirst: small items go first, and no item is overtaken by more than the stated bound."""

from __future__ import annotations

import random

import pytest

from stoker.base.shortest_first import OVERTAKING_RATIO, SHRINKING_TOKENS, ShortestFirst


def drain(queue: ShortestFirst[str], chunk: int, sizes: dict[str, int]) -> list[str]:
    """Give the next item up to `chunk` tokens until the queue is empty. Return the items in the order of their ends."""
    done = []
    while queue:
        item = queue.next
        tokens = min(chunk, sizes[item])
        queue.charge(item, tokens)
        sizes[item] -= tokens
        if sizes[item]:
            queue.resize(item, sizes[item])
        else:
            queue.remove(item)
            done.append(item)
    return done


def test_the_smallest_goes_first_and_equal_ones_in_order_of_arrival() -> None:
    queue: ShortestFirst[str] = ShortestFirst(1000)
    sizes = {"long": 90, "b": 5, "a": 5, "tiny": 1}
    for arrival, (item, size) in enumerate(sizes.items()):
        queue.add(item, size, arrival)
    assert (queue.oldest, queue.newest, queue.items()) == ("long", "tiny", list(sizes))
    assert [queue.num_before(size) for size in (0, 1, 4, 5, 89, 90)] == [0, 1, 1, 3, 3, 4]
    assert drain(queue, 1000, sizes) == ["tiny", "b", "a", "long"]


def test_an_item_shrinks_while_others_are_computed() -> None:
    queue: ShortestFirst[str] = ShortestFirst(10**6)
    queue.add("large", 100, 0)
    queue.add("other", 10**9, 1)
    queue.charge("other", 50 * SHRINKING_TOKENS)
    queue.add("49 less", 51, 2)
    queue.add("50 less", 50, 3)
    queue.add("51 less", 49, 4)
    assert queue.num_before(51) == 4
    assert drain(queue, 100, {"large": 1, "49 less": 1, "50 less": 1, "51 less": 1, "other": 1}) == [
        "51 less",
        "large",
        "50 less",
        "49 less",
        "other",
    ]


def test_the_oldest_gets_one_of_four_tokens_under_a_flood() -> None:
    queue: ShortestFirst[str] = ShortestFirst(10)
    queue.add("long", 10_000, 0)
    left, others = 10_000, 0
    for arrival in range(1, 4000):
        queue.add(f"short {arrival}", 10, arrival)
        item = queue.next
        queue.charge(item, 10)
        if item == "long":
            left -= 10
            queue.resize(item, left)
        else:
            others += 10
            queue.remove(item)
        assert others <= OVERTAKING_RATIO * (10_000 - left + 10) + 10
    assert left <= 10


def test_a_removed_oldest_item_leaves_the_turn_to_the_next() -> None:
    queue: ShortestFirst[str] = ShortestFirst(10)
    for arrival, item in enumerate(["first", "second", *"abcd"]):
        queue.add(item, 10 if item in "abcd" else 500, arrival)
    for item in "abc":
        assert queue.next == item
        queue.charge(item, 10)
        queue.remove(item)
    assert queue.next == "first"
    queue.remove("first")
    assert queue.next == "second"


@pytest.mark.parametrize("seed", range(60))
def test_no_item_is_overtaken_by_more_than_the_bound(seed: int) -> None:
    """Random arrivals, sizes, cancellations and chunks. For each item, the tokens of later items are counted until its end."""
    print("seed", seed)
    rng = random.Random(seed)
    step_tokens = rng.choice([1, 8, 100])
    chunk = rng.choice([1, step_tokens, 10**9])
    queue: ShortestFirst[int] = ShortestFirst(step_tokens)
    sizes: dict[int, int] = {}
    ahead: dict[int, int] = {}  # W of each item
    overtaken: dict[int, int] = {}
    largest, arrival = 0, 0
    for _ in range(1500):
        for _ in range(rng.choice([0, 1, 1, 2, 10 if rng.random() < 0.05 else 0])):
            sizes[arrival] = rng.choice([1, rng.randint(1, 30), rng.randint(1, 3000)])
            queue.add(arrival, sizes[arrival], arrival)
            ahead[arrival] = sum(sizes.values())
            overtaken[arrival] = 0
            arrival += 1
        if sizes and rng.random() < 0.02:
            gone = rng.choice(list(sizes))
            queue.remove(gone)
            del sizes[gone]
        if not sizes:
            continue
        item = queue.next
        tokens = min(chunk, sizes[item])
        largest = max(largest, tokens)
        queue.charge(item, tokens)
        for other in sizes:
            if other < item:
                overtaken[other] += tokens
                assert overtaken[other] < OVERTAKING_RATIO * (ahead[other] + step_tokens) + largest
        sizes[item] -= tokens
        if sizes[item]:
            queue.resize(item, sizes[item])
        else:
            queue.remove(item)
            del sizes[item]

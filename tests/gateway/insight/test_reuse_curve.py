"""The reuse curve agrees with a cache of that size that really evicts the least recently used block."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from stoker.gateway.insight.reuse_curve import RATE, ReuseCurve

BLOCK = 16


def lru_hit_ratio(prompts: list[list[int]], capacity_blocks: int) -> float:
    held: OrderedDict[int, None] = OrderedDict()
    hits = uses = 0
    for keys in prompts:
        for key in keys:
            uses += 1
            hits += key in held
            held[key] = None
            held.move_to_end(key)
            while len(held) > capacity_blocks:
                held.popitem(last=False)
    return hits / uses


def conversations(seed: int, count: int, turns: int) -> list[list[int]]:
    """Return the prefix keys of prompts: each turn sends the conversation so far and some more blocks."""
    rng = random.Random(seed)
    chats: list[list[int]] = [[] for _ in range(count)]
    prompts = []
    for _ in range(count * turns):
        chat = rng.choice(chats)
        chat += [rng.getrandbits(64) for _ in range(rng.randrange(64, 192))]
        prompts.append(list(chat))
    return prompts


def test_the_curve_is_that_of_a_real_cache() -> None:
    prompts = conversations(seed=1, count=30, turns=4)
    curve = ReuseCurve()
    for number, keys in enumerate(prompts):
        curve.use(curve.sample(keys), BLOCK, float(number))
    for capacity_blocks in (1000, 4000, 16_000, 64_000):
        found = curve.hit_ratio(capacity_blocks * BLOCK)
        assert found == pytest.approx(lru_hit_ratio(prompts, capacity_blocks), abs=0.08), capacity_blocks


def test_points_rise_to_what_can_be_hit_at_all() -> None:
    curve = ReuseCurve()
    for number, keys in enumerate(conversations(seed=2, count=10, turns=4)):
        curve.use(curve.sample(keys), BLOCK, float(number))
    points = curve.points()
    assert [ratio for _, ratio in points] == sorted(ratio for _, ratio in points)
    assert points[-1][1] == points[-2][1] > 0.5


def test_memory_is_bounded_and_uses_are_renumbered() -> None:
    curve = ReuseCurve(max_blocks=64)
    for number in range(5000):
        curve.use([number % 40], BLOCK, 0.0)
    assert curve.hit_ratio(64 * RATE * BLOCK) == pytest.approx(1.0, abs=0.02)
    assert curve.hit_ratio(16 * RATE * BLOCK) == 0.0
    for number in range(1000):
        curve.use([10_000 + number], BLOCK, 0.0)
    assert len(curve._used_at) == 64


def test_old_uses_weigh_less() -> None:
    curve = ReuseCurve()
    curve.use([8] * 100, BLOCK, 0.0)
    curve.use([16 + 8 * n for n in range(100)], BLOCK, 36_000.0)
    assert (curve.hit_ratio(1 << 30) or 1.0) < 0.01


def test_nothing_is_known_without_requests() -> None:
    assert ReuseCurve().points() == []
    assert ReuseCurve().hit_ratio(100) is None

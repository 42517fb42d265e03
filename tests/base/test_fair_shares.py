"""Shares of tenants by weight: extreme weights, and tenants that left."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from stoker.base.fair_shares import FairShares


def served(shares: FairShares, weights: dict[str, float], rounds: int, tokens: int = 32) -> Counter[str]:
    """Give work to the tenant with the earliest start, again and again."""
    found: Counter[str] = Counter()
    for _ in range(rounds):
        shares.trim()
        tenant = min(weights, key=shares.start)
        shares.charge(tenant, tokens, weights[tenant])
        found[tenant] += 1
    return found


def test_tenants_that_left_are_forgotten() -> None:
    shares = FairShares()
    for number in range(10_000):
        shares.trim()
        shares.charge(f"tenant {number}", 100, 1.0)
        shares.charge("always here", 100, 1.0)
    assert len(shares) < 200


def test_shares_are_exact_after_years_of_work_at_the_smallest_weight() -> None:
    shares = FairShares()
    for _ in range(1000):
        shares.trim()
        shares.charge("light", 10**9, 1e-6)
    assert served(shares, {"a": 1e6, "b": 2e6}, 300) == {"a": 100, "b": 200}


@pytest.mark.parametrize("seed", range(5))
def test_trimming_changes_no_order(seed: int) -> None:
    rng = random.Random(seed)
    trimmed, kept = FairShares(), FairShares()
    weights = {str(number): rng.choice((1.0, 2.0, 4.0)) for number in range(200)}
    num_forgotten = 0
    for _ in range(2000):
        before = len(trimmed)
        trimmed.trim()
        num_forgotten += before - len(trimmed)
        some = rng.sample(sorted(weights), 3)
        tenant = min(some, key=trimmed.start)
        assert tenant == min(some, key=kept.start)
        tokens = rng.randrange(1, 5000)
        trimmed.charge(tenant, tokens, weights[tenant])
        kept.charge(tenant, tokens, weights[tenant])
    assert num_forgotten > 50


def test_a_correction_counts_after_the_tenant_was_forgotten() -> None:
    shares = FairShares()
    shares.charge("a", 10, 1.0)
    for number in range(200):
        shares.charge(f"tenant {number}", 10, 1.0)
        shares.charge("b", 10, 1.0)
    shares.trim()
    shares.correct("a", 100, 1.0)
    assert shares.start("a") > shares.start("b")

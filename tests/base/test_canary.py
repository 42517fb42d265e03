"""A canary is stopped when it fails more often or is much slower than the rest, and never by chance."""

from __future__ import annotations

import random

from stoker.base.canary import CanaryLimits, RequestGroup, judge

LIMITS = CanaryLimits()


def group(rng: random.Random, count: int, failed: float = 0.0, scale: float = 1.0) -> RequestGroup:
    num_failed = sum(rng.random() < failed for _ in range(count))
    good = count - num_failed
    return RequestGroup(
        count,
        num_failed,
        [scale * 100.0 * rng.lognormvariate(0.0, 1.0) for _ in range(good)],
        [scale * 10.0 * rng.lognormvariate(0.0, 0.3) for _ in range(good)],
    )


def test_failures_stop_a_canary() -> None:
    rng = random.Random(1)
    verdict = judge(group(rng, 60, failed=0.3), group(rng, 1000, failed=0.01), LIMITS)
    assert verdict.stop
    assert "of 60 requests failed" in verdict.reason
    assert verdict.numbers["canary_requests"] == 60


def test_failures_of_all_do_not() -> None:
    rng = random.Random(2)
    assert not judge(group(rng, 200, failed=0.3), group(rng, 1000, failed=0.3), LIMITS).stop


def test_a_small_difference_does_not() -> None:
    rest = RequestGroup(100_000, 0)
    assert not judge(RequestGroup(100_000, 1_900), rest, LIMITS).stop, "below error_margin"
    assert judge(RequestGroup(100_000, 2_100), rest, LIMITS).stop


def test_few_requests_are_not_judged() -> None:
    assert not judge(RequestGroup(49, 49), RequestGroup(1000, 0), LIMITS).stop
    assert not judge(RequestGroup(1000, 1000), RequestGroup(49, 0), LIMITS).stop
    assert judge(RequestGroup(50, 50), RequestGroup(50, 0), LIMITS).stop


def test_slow_answers_stop_a_canary() -> None:
    rng = random.Random(3)
    rest = group(rng, 1000)
    verdict = judge(group(rng, 400, scale=3.0), rest, LIMITS)
    assert verdict.stop
    assert "the 90th percentile of the time to the first token is" in verdict.reason
    slow_steps = RequestGroup(400, 0, group(rng, 400).ttft_ms, group(rng, 400, scale=2.5).itl_ms)
    assert "time between tokens" in judge(slow_steps, rest, LIMITS).reason


def test_equal_canaries_are_almost_never_stopped() -> None:
    """Each canary is judged a hundred times while its requests come in."""
    stopped = 0
    for seed in range(60):
        rng = random.Random(seed)
        canary, rest = group(rng, 1000, failed=0.05), group(rng, 1000, failed=0.05)
        stopped += any(
            judge(
                RequestGroup(n, round(0.05 * n), canary.ttft_ms[:n], canary.itl_ms[:n]),
                rest,
                LIMITS,
            ).stop
            for n in range(50, 950, 9)
        )
    assert stopped <= 1

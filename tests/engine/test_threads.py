"""ThreadTuner finds the faster thread count, also after a change."""

from __future__ import annotations

import random

import pytest

from stoker.engine.threads import ThreadTuner


@pytest.mark.parametrize("seed", range(20))
def test_the_faster_count_is_used_nearly_always_and_a_change_is_noticed(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    tuner = ThreadTuner(2)

    def steps(seconds: dict[int, float], count: int) -> list[int]:
        chosen = []
        for _ in range(count):
            num_tokens = rng.choice([9, 12, 15])
            threads = tuner.choose(num_tokens)
            noise = 1.0 if rng.random() < 0.9 else rng.uniform(1, 5)
            tuner.record(num_tokens, threads, seconds[threads] * (12 + num_tokens) * rng.uniform(1, 1.1) * noise)
            chosen.append(threads)
        return chosen

    assert steps({1: 0.10, 2: 0.06}, 600).count(2) > 0.95 * 600
    busy = steps({1: 0.10, 2: 0.25}, 600)
    assert busy.count(1) > 0.95 * 600
    idle = steps({1: 0.10, 2: 0.06}, 600)
    assert idle.count(2) > 0.45 * 600  # after a noisy trial, the next one is 128 steps away


def test_one_core_leaves_no_choice() -> None:
    tuner = ThreadTuner(1)
    for _ in range(500):
        assert tuner.choose(4) == 1
        tuner.record(4, 1, 0.1)

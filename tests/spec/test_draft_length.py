"""The number of drafts follows from what a draft costs and how likely it is right."""

from __future__ import annotations

import itertools
import random

import pytest

from stoker.sched.draft_tape import MAX_DRAFTS, MAX_GUESSES, MODEL_GUESSES
from stoker.sched.step_costs import StepCosts
from stoker.spec.draft_length import DraftChance, draft_lengths, guess_count, least_chance

MEMORY_BOUND = StepCosts(fixed_s=4e-3, token_s=24e-6, row_s=0.0)  # a large GPU at a small batch
COMPUTE_BOUND = StepCosts(fixed_s=0.0, token_s=1e-3, row_s=0.0)


def speed(rates: list[float], lengths: tuple[int, ...], costs: StepCosts) -> float:
    """Return the expected tokens per second of a step."""
    tokens = sum(sum(rate**k for k in range(length + 1)) for rate, length in zip(rates, lengths, strict=True))
    return tokens / (costs.decode_s(len(rates)) + sum(lengths) * costs.token_s)


def test_before_any_measurement_all_available_drafts_are_verified() -> None:
    assert draft_lengths([DraftChance(0.1, 7), DraftChance(0.9, 40)], 2, 100, StepCosts()) == [7, MAX_DRAFTS]


def test_a_likely_draft_pays_where_compute_is_idle_and_not_where_it_is_busy() -> None:
    assert draft_lengths([DraftChance(0.9, 8)], 1, 100, MEMORY_BOUND) == [8]
    assert draft_lengths([DraftChance(0.9, 8)], 1, 100, COMPUTE_BOUND) == [0]


def test_fewer_drafts_are_verified_in_larger_batches() -> None:
    lengths = [draft_lengths([DraftChance(0.8, 15)] * rows, rows, 10_000, MEMORY_BOUND)[0] for rows in (1, 8, 64, 256)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]


def test_unlikely_drafts_are_not_verified() -> None:
    least = least_chance(MEMORY_BOUND, 64)
    assert 0.1 < least < 0.9
    assert draft_lengths([DraftChance(0.5 * least, 9), DraftChance(0.95, 9)], 64, 100, MEMORY_BOUND)[0] == 0


@pytest.mark.parametrize("seed", range(20))
def test_the_lengths_are_nearly_as_fast_as_the_best_ones(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    costs = StepCosts(rng.uniform(1e-3, 2e-2), rng.uniform(1e-5, 2e-3), rng.uniform(0.0, 1e-3))
    rates = [rng.uniform(0.0, 0.95) for _ in range(3)]
    best = max(speed(rates, lengths, costs) for lengths in itertools.product(range(7), repeat=3))
    lengths = draft_lengths([DraftChance(rate, 6) for rate in rates], 3, 18, costs)
    assert speed(rates, tuple(lengths), costs) >= 0.97 * best
    assert speed(rates, tuple(lengths), costs) >= speed(rates, (0, 0, 0), costs)


@pytest.mark.parametrize("budget", [0, 1, 5, 11])
def test_the_budget_is_kept(budget: int) -> None:
    lengths = draft_lengths([DraftChance(0.9, 9)] * 3, 3, budget, MEMORY_BOUND)
    assert sum(lengths) <= budget
    assert max(lengths) - min(lengths) <= 1


def test_guesses_that_never_pay_are_not_made() -> None:
    dear = MEMORY_BOUND._replace(guess_s=4e-3)  # as long as a step
    assert guess_count([0.5], 1, dear) == 0
    assert guess_count([0.0] * 8, 8, MEMORY_BOUND) == 0
    assert guess_count([0.9] * 8, 8, COMPUTE_BOUND) == 0
    assert guess_count([], 8, MEMORY_BOUND) == 0
    assert guess_count([0.9], 1, StepCosts()) == MODEL_GUESSES, "nothing was measured"


def test_more_guesses_are_made_where_they_are_right_more_often() -> None:
    costs = MEMORY_BOUND._replace(guess_s=2e-4)
    counts = [guess_count([rate] * 8, 8, costs) for rate in (0.1, 0.4, 0.7, 0.95)]
    assert counts == sorted(counts)
    assert counts[0] < counts[1] < counts[2] < counts[3] == MAX_GUESSES

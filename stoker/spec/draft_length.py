"""How many drafts of each sequence a step verifies. Pure.

A draft that is right with probability q adds q tokens and costs the time of one more token in the step. A step of time T
that brings E tokens is worth E / T tokens per second. So a draft pays if q / token_s is at least E / T. The k-th draft of
a sequence counts only if those before it are right: q = p ** k for an acceptance rate p. E and T grow with the drafts
that pay, so the limit is computed twice.

The guesses of a draft model cost time when they are made: each is one run of the draft model over all rows. Their number is
chosen one step before they are verified, in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from typing import NamedTuple

from stoker.sched.draft_tape import MAX_DRAFTS, MAX_GUESSES, MODEL_GUESSES
from stoker.sched.step_costs import StepCosts

_MAX_RATE = 0.98  # no source is trusted more
_MARGIN = 1.1  # a draft must be worth this many times its cost: costs and rates are estimates


class DraftChance(NamedTuple):
    """What one sequence could verify."""

    rate: float  # the estimated probability that a draft is right, if those before it are
    available: int  # drafts on its tape


def least_chance(costs: StepCosts, num_rows: int, num_drafts: float = 0.0, expected: float = 0.0) -> float:
    """Return the probability of being right from which a draft pays, in a step of `num_rows` decoding sequences that has
    `num_drafts` drafts, of which `expected` are right. 0 before any step was measured."""
    step_s = costs.decode_s(num_rows) + num_drafts * costs.token_s
    return _MARGIN * costs.token_s * (num_rows + expected) / step_s if step_s else 0.0


def draft_lengths(chances: Items[DraftChance], num_rows: int, budget: int, costs: StepCosts) -> list[int]:
    """Return the number of drafts for each of the sequences, at most `budget` in total."""
    least = least_chance(costs, num_rows)
    lengths = [_length(chance, least) for chance in chances]
    expected = sum(_expected(chance.rate, length) for chance, length in zip(chances, lengths, strict=True))
    least = max(least, least_chance(costs, num_rows, sum(lengths), expected))
    lengths = [_length(chance, least) for chance in chances]
    while sum(lengths) > budget:
        longest = max(lengths)
        lengths = [min(length, longest - 1) for length in lengths]
    return lengths


def guess_count(rates: Items[float], num_rows: int, costs: StepCosts) -> int:
    """Return how many guesses of a draft model pay after a step of `num_rows` decoding sequences. `rates` are the
    probabilities that a guess is right, if those before it are, of the sequences that would verify them."""
    step_s, tokens = costs.decode_s(num_rows), float(num_rows)
    if not step_s:
        return MODEL_GUESSES
    least = least_chance(costs, num_rows)
    for number in range(1, MAX_GUESSES + 1):
        chances = [chance for rate in rates if (chance := min(rate, _MAX_RATE) ** number) >= least]
        gain, cost_s = sum(chances), costs.guess_s + len(chances) * costs.token_s
        if not gain or gain * step_s < _MARGIN * cost_s * tokens:
            return number - 1
        step_s, tokens = step_s + cost_s, tokens + gain
    return MAX_GUESSES


def _length(chance: DraftChance, least: float) -> int:
    """Return how many drafts are right with a probability of at least `least`."""
    available = min(chance.available, MAX_DRAFTS)
    if least <= 0.0:
        return available
    if chance.rate < least:
        return 0
    rate = min(chance.rate, _MAX_RATE)
    return max(0, min(available, int(math.log(min(1.0, least)) / math.log(rate))))


def _expected(rate: float, length: int) -> float:
    """Return the expected number of right drafts among `length`."""
    rate = min(rate, _MAX_RATE)
    return rate * (1.0 - rate**length) / (1.0 - rate)

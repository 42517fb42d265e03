"""DraftTape: a guessed continuation of one sequence.

It is uploaded to the device, which takes the drafts of a step from it as long as the tokens sampled so far agree with
it. So a plan can be made before the results of earlier steps are known.
"""

from __future__ import annotations

from dataclasses import dataclass

TAPE_TOKENS = 64  # the most tokens of one tape
MAX_DRAFTS = 15  # the most drafts of one span
MODEL_GUESSES = 3  # tokens that a draft model guesses after each step, before any step was measured
MAX_GUESSES = 8  # the most of them; more are accepted too rarely
_MIN_HEADS = 64


def max_heads(max_rows: int) -> int:
    """Return the most tokens of a step whose logits are computed: one per row, and the drafts."""
    return max(max_rows, _MIN_HEADS)


@dataclass(frozen=True, slots=True)
class DraftTape:
    """What may follow a sequence's tokens: `token_ids[i]` is a guess for position `start + i`.

    A negative entry ~t is drafted as t and never compared with the sampled tokens: the tape stays valid after it.
    """

    start: int
    token_ids: list[int]
    source: str  # the name of the drafter

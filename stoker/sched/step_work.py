"""StepWork: how much a step plan computes, in the numbers that its time depends on. Pure."""

from __future__ import annotations

from typing import NamedTuple

from stoker.sched.plan import StepPlan


class StepWork(NamedTuple):
    """The size of one step. Drafts count as tokens."""

    tokens: int
    rows: int  # rows that sample
    context_tokens: int  # tokens that decoding rows attend to
    attended_pairs: float  # pairs of a prompt token and a token that it attends to
    longest: int  # tokens of the longest row


def work_of(plan: StepPlan) -> StepWork:
    """Return the size of a plan's forward pass."""
    rows = context = longest = 0
    pairs = 0.0
    for span in plan.spans:
        known = span.count - span.num_drafts
        end = span.start + known
        if known == 1 and not span.in_prompt:
            context += end
        else:
            pairs += known * (span.start + (known + 1) / 2)
        rows += span.samples
        if end > longest:
            longest = end
    return StepWork(plan.num_tokens, rows, context, pairs, longest)

"""Heads: the tokens of a step whose logits are computed, because the token after each of them is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stoker.base.ids import Row
from stoker.sched.plan import StepPlan

Ints = NDArray[np.int64]

HEAD_FIELDS = 4


@dataclass(frozen=True, slots=True)
class SamplingSpan:
    """A span that samples: a token after its last known token, and one after each of its drafts."""

    row: Row
    head: (
        int  # index of its first head; the heads of its drafts follow. -1: the row is at its limit and samples nothing
    )
    length: int  # tokens before the first sampled one
    drafts: list[int]


def put_heads(
    heads: Ints, first: Ints, count: Ints, row: Ints, samples: NDArray[np.bool_], drafts: Ints | None
) -> None:
    """Write the heads of sampling spans: those of the last known token and of the drafts. All of them sample."""
    first, count, row = (first + count - 1)[samples], count[samples], row[samples]
    if drafts is None:
        num_heads = len(first)
        heads[0, :num_heads] = first
        heads[1, :num_heads] = row
    else:
        drafts = drafts[samples]
        per_span = drafts + 1
        num_heads = int(per_span.sum())
        place = np.arange(num_heads) - (per_span.cumsum() - per_span).repeat(per_span)  # within the span
        heads[0, :num_heads] = (first - drafts).repeat(per_span) + place
        heads[1, :num_heads] = row.repeat(per_span)
        heads[3, :num_heads] = np.where(place == 0, drafts.repeat(per_span), -1)
    heads[2, :num_heads] = 1


def first_heads(plan: StepPlan) -> Sequence[int]:
    """Return the first head of each sampling span of a GPU step."""
    num_heads = [1 + span.num_drafts for span in plan.spans if span.samples]
    return [end - count for end, count in zip(accumulate(num_heads), num_heads, strict=True)]


def heads_of(plan: StepPlan) -> Ints:
    """Return the heads of a GPU step: see kernels/verify.py."""
    spans = plan.spans
    counts = np.array([span.count for span in spans])
    drafts = np.array([span.num_drafts for span in spans])
    samples = np.array([span.samples for span in spans])
    heads = np.zeros((HEAD_FIELDS, int(samples.sum()) + plan.num_drafts), np.int64)
    put_heads(heads, counts.cumsum() - counts, counts, np.array([span.row for span in spans]), samples, drafts)
    return heads


def sampling_spans(plan: StepPlan, firsts: Sequence[int], token_ids: Tensor, positions: Tensor) -> list[SamplingSpan]:
    """Return the sampling spans of a GPU step whose tokens are sampled by the reference. token_ids, positions [tokens].

    If the plan has drafts, or others are in flight, this waits for the step: only the device knows positions and drafts.
    """
    counts = np.array([span.count for span in plan.spans])
    starts = (counts.cumsum() - counts).tolist()
    sampling = [(span, start) for span, start in zip(plan.spans, starts, strict=True) if span.samples]
    if not any(span.num_drafts or span.slack for span, _ in sampling):
        return [
            SamplingSpan(span.row, head, span.start + span.count, [])
            for (span, _), head in zip(sampling, firsts, strict=True)
        ]
    ids, at = token_ids.tolist(), positions.tolist()
    spans = []
    for (span, start), head in zip(sampling, firsts, strict=True):
        last = start + span.count - span.num_drafts - 1
        drafts = [ids[last + j] for j in range(1, span.num_drafts + 1) if at[last + j] >= 0]
        spans.append(SamplingSpan(span.row, head if at[last] >= 0 else -1, at[last] + 1, drafts))
    return spans

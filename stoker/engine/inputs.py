"""Builds the inputs of a step for the reference kernels. On a GPU, packed.py prepares them instead."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.engine.heads import HEAD_FIELDS, SamplingSpan, put_heads
from stoker.engine.rows import RowTable
from stoker.kernels.attention import SpanGroup, SpanShape, group_spans
from stoker.kernels.attention_grid import GridSpans, grid_spans
from stoker.kernels.attention_rows import RowGroup
from stoker.kernels.mla_split import SplitSpans, split_spans
from stoker.kernels.step_inputs import step_tokens_ref
from stoker.kernels.transfer import to_device
from stoker.kv.device.device_kv import DeviceKv, GroupKv
from stoker.layers.batch import ForwardBatch, GroupInputs
from stoker.parallel.stages import ONE_STAGE, Stages
from stoker.sched.plan import Span, StepPlan

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ReferenceInputs:
    """The device tensors of a plan's forward pass, and what is sampled after it.

    Unlike a GPU step, it has no padding: drafts that do not exist are left out.
    """

    batch: ForwardBatch
    token_rows: Tensor  # [tokens]
    heads: Tensor  # [4, heads]: see kernels/verify.py
    spans: list[SamplingSpan]


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of a step, with the positions that the device knows."""

    counts: Ints  # tokens of each span
    starts: Ints  # position of the first token of each span
    rows: Ints  # row of each token
    token_ids: Tensor


def build_inputs(
    plan: StepPlan,
    rows: RowTable,
    kv: DeviceKv,
    attention_dtype: torch.dtype | None = None,
    exact: bool = False,
    grid_heads: int | None = None,
    stages: Stages = ONE_STAGE,
) -> ReferenceInputs:
    """Return the inputs of the plan's forward pass. Attention is computed in `attention_dtype`, by default in the dtype of
    the activations. `exact`: see `group_spans`. `grid_heads`: the number of query heads, for attention_grid.py."""
    attention_dtype = attention_dtype or kv.like.dtype
    layout, device = kv.layout, kv.device
    tokens = _tokens(plan, rows, stages)
    firsts = tokens.counts.cumsum() - tokens.counts
    positions = np.arange(len(tokens.rows)) - (firsts - tokens.starts).repeat(tokens.counts)
    numbers, offsets = np.divmod(positions, layout.block_tokens)
    in_place = kv.like.dtype == kv.blocks.dtype == attention_dtype

    def group_inputs(group: GroupKv, grid_heads: int | None = None) -> GroupInputs:
        blocks = rows.blocks[group.kv_set][tokens.rows, numbers]
        slots = blocks[:, None] * group.pages_per_block + np.arange(group.num_heads)
        slots = slots * layout.block_tokens + offsets[:, None]
        shapes = _shapes(plan, tokens, rows, group)
        found: list[SpanGroup | RowGroup] | GridSpans | SplitSpans
        if group.split.of > 1:
            found = split_spans(shapes, layout.block_tokens, group.split, device, attention_dtype, exact)
        elif grid_heads is not None:
            pages = group.pages(group.num_layers - 1)
            found = grid_spans(shapes, slots, grid_heads, group.num_heads, pages, group.width, group.reach)
        else:
            sizes = (group.num_heads, layout.block_tokens)
            found = group_spans(shapes, *sizes, device, attention_dtype, in_place, exact, group.reach)
        return GroupInputs(group.split.slots(_to_device(slots.ravel(), device), layout.block_tokens), found, group)

    batch = ForwardBatch(
        token_ids=tokens.token_ids,
        positions=_to_device(positions, device),
        groups=tuple(group_inputs(group, grid_heads) for group in kv.groups),
        draft=None if kv.draft is None else group_inputs(kv.draft),
    )
    heads, sampling = _heads(plan, tokens, firsts)
    return ReferenceInputs(batch, _to_device(tokens.rows, device), _to_device(heads, device), sampling)


def _tokens(plan: StepPlan, rows: RowTable, stages: Stages) -> _Tokens:
    spans, device = plan.spans, rows.tokens.device
    counts = np.array([span.count for span in spans])
    starts = np.array([span.start for span in spans])
    token_rows = np.array([span.row for span in spans]).repeat(counts)
    if min(plan.token_ids) >= 0:
        return _Tokens(counts, starts, token_rows, to_device(plan.token_ids, device))
    step = np.stack([token_rows, plan.token_ids, np.zeros_like(token_rows)])
    firsts = counts.cumsum() - counts
    step[2] = np.arange(len(token_rows)) - (firsts - starts).repeat(counts)
    token_ids, found = stages.tokens(len(token_rows), lambda: step_tokens_ref(_to_device(step, device), rows.tokens))
    positions = found.cpu().numpy()
    is_there = positions >= 0
    if not is_there.all():
        token_ids, token_rows = token_ids[torch.from_numpy(is_there).to(device)], token_rows[is_there]
    return _Tokens(np.add.reduceat(is_there, firsts, dtype=np.int64), positions[firsts], token_rows, token_ids)


def _shapes(plan: StepPlan, tokens: _Tokens, rows: RowTable, group: GroupKv) -> list[SpanShape]:
    shapes, first = [], 0
    for span, start, count in zip(plan.spans, tokens.starts.tolist(), tokens.counts.tolist(), strict=True):
        num_drafts = max(0, count - (span.count - span.num_drafts))
        if count:
            num_blocks = -(-(start + count) // group.block_tokens)
            pages = (rows.blocks[group.kv_set][span.row, :num_blocks] * group.pages_per_block).tolist()
            shapes.append(SpanShape(first, start, count, pages, num_drafts))
        first += count
    return shapes


def _heads(plan: StepPlan, tokens: _Tokens, firsts: Ints) -> tuple[Ints, list[SamplingSpan]]:
    """Return the heads of the sampling spans, and the spans themselves. A span that is beyond its limit has no heads."""
    drafts = np.array([span.num_drafts for span in plan.spans])
    drafts = tokens.counts - (np.array([span.count for span in plan.spans]) - drafts)
    samples = np.array([span.samples for span in plan.spans])
    is_head = samples & (tokens.counts > 0)
    per_span = np.where(is_head, drafts + 1, 0)
    heads = np.zeros((HEAD_FIELDS, int(per_span.sum())), np.int64)
    put_heads(heads, firsts, tokens.counts, np.array([span.row for span in plan.spans]), is_head, drafts)
    first_heads = np.where(is_head, per_span.cumsum() - per_span, -1).tolist()
    lengths = (tokens.starts + tokens.counts - drafts).tolist()
    draft_ids = tokens.token_ids.tolist() if plan.num_drafts else []

    def sampling_span(i: int, span: Span) -> SamplingSpan:
        first = int(firsts[i] + tokens.counts[i] - drafts[i])
        return SamplingSpan(span.row, first_heads[i], lengths[i], draft_ids[first : first + int(drafts[i])])

    return heads, [sampling_span(i, span) for i, span in enumerate(plan.spans) if span.samples]


def _to_device(values: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)

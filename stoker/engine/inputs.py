"""Builds the ForwardBatch of a plan for the reference kernels. On a GPU, packed.py prepares the inputs instead."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.engine.rows import RowTable
from stoker.kernels.attention import SpanShape, group_spans
from stoker.kernels.transfer import to_device
from stoker.kv.device.device_kv import DeviceKv
from stoker.layers.batch import ForwardBatch
from stoker.sched.plan import ON_DEVICE, StepPlan

Ints = NDArray[np.int64]


def build_batch(
    plan: StepPlan, rows: RowTable, kv: DeviceKv, attention_dtype: torch.dtype | None = None, exact: bool = False
) -> ForwardBatch:
    """Return the device tensors of the plan's forward pass. Attention is computed in `attention_dtype`, by default in
    the dtype of the activations. `exact`: see `group_spans`."""
    attention_dtype = attention_dtype or kv.like.dtype
    layout, device = kv.layout, kv.blocks.device
    counts = np.array([span.count for span in plan.spans])
    firsts = counts.cumsum() - counts
    starts = np.array([span.start for span in plan.spans])
    token_rows = np.array([span.row for span in plan.spans]).repeat(counts)
    positions = np.arange(len(token_rows)) - (firsts - starts).repeat(counts)
    pages = rows.blocks[token_rows, positions // layout.block_tokens] * kv.pages_per_block
    heads = np.arange(layout.num_heads)
    slots = (pages[:, None] + heads) * layout.block_tokens + (positions % layout.block_tokens)[:, None]
    sizes = (layout.num_heads, layout.block_tokens)
    in_place = kv.like.dtype == kv.blocks.dtype == attention_dtype
    return ForwardBatch(
        token_ids=_token_ids(plan, rows.last_token, token_rows),
        positions=_to_device(positions, device),
        slots=_to_device(slots.ravel(), device),
        spans=group_spans(_shapes(plan, rows, kv), *sizes, device, attention_dtype, in_place, exact),
        kv=kv,
    )


def _shapes(plan: StepPlan, rows: RowTable, kv: DeviceKv) -> list[SpanShape]:
    shapes, first = [], 0
    for span in plan.spans:
        num_blocks = -(-(span.start + span.count) // kv.layout.block_tokens)
        pages = (rows.blocks[span.row, :num_blocks] * kv.pages_per_block).tolist()
        shapes.append(SpanShape(first, span.start, span.count, pages, span.num_drafts))
        first += span.count
    return shapes


def _token_ids(plan: StepPlan, last_token: Tensor, token_rows: Ints) -> Tensor:
    token_ids = to_device(plan.token_ids, last_token.device)
    if ON_DEVICE in plan.token_ids:
        sampled = last_token[_to_device(token_rows, last_token.device)]
        token_ids = torch.where(token_ids == ON_DEVICE, sampled, token_ids)
    return token_ids


def _to_device(values: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)

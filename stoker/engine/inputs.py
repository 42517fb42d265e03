"""A plan's spans -> ForwardBatch."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.engine.rows import RowTable
from stoker.kernels.attention import SpanShape, group_spans
from stoker.kernels.transfer import to_device
from stoker.kv.device import DeviceKv
from stoker.layers.batch import ForwardBatch
from stoker.sched.plan import ON_DEVICE, StepPlan


def build_batch(plan: StepPlan, rows: RowTable, kv: DeviceKv) -> ForwardBatch:
    layout, device = kv.layout, kv.blocks.device
    positions: list[int] = []
    pages: list[int] = []  # of each token's block: the layer's first head
    token_rows: list[int] = []
    shapes: list[SpanShape] = []
    for span in plan.spans:
        end = span.start + span.count
        num_blocks = -(-end // layout.block_tokens)
        block_pages = (rows.blocks[span.row, :num_blocks] * kv.pages_per_block).tolist()
        shapes.append(SpanShape(len(positions), span.start, span.count, block_pages))
        positions += range(span.start, end)
        pages += [block_pages[position // layout.block_tokens] for position in range(span.start, end)]
        token_rows += [span.row] * span.count
    where = torch.tensor([pages, positions])
    heads = torch.arange(layout.num_heads)
    slots = (where[0, :, None] + heads) * layout.block_tokens + (where[1, :, None] % layout.block_tokens)
    return ForwardBatch(
        token_ids=_token_ids(plan, rows.last_token, token_rows),
        positions=where[1].to(device, non_blocking=True),
        slots=slots.flatten().to(device, non_blocking=True),
        groups=group_spans(shapes, layout.num_heads, layout.block_tokens, device, kv.blocks.dtype),
        kv=kv,
    )


def _token_ids(plan: StepPlan, last_token: Tensor, token_rows: list[int]) -> Tensor:
    token_ids = to_device(plan.token_ids, last_token.device)
    if ON_DEVICE in plan.token_ids:
        drawn = last_token[to_device(token_rows, last_token.device)]
        token_ids = torch.where(token_ids == ON_DEVICE, drawn, token_ids)
    return token_ids

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Verifies drafts: keeps sampled tokens up to the first draft that differs, and adds them to the rows.

heads [4, heads]: each head's token, its row, whether it samples (0 or 1), and on the first head of a span the number of drafts
    that follow, -1 on the others. The heads of a span are consecutive, and so are their tokens.
token_ids, positions [tokens]: from step_inputs.py; a draft that does not exist is padding
sampled [heads]: the token sampled after each head's token, or -1 where a grammar ended before   row_tokens: see
    row_tokens.py
-> counts [heads]: how many of the tokens sampled at this head and those after it are kept; 0 on all but first heads
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.dispatch import next_power_of_2, on_gpu, overlaps, tl, triton, wait_for_inputs
from stoker.kernels.row_tokens import COLUMNS, LENGTH, RECENT, WINDOW

MAX_SPAN = 16  # the most heads of a span


def verify_ref(heads: Tensor, token_ids: Tensor, positions: Tensor, sampled: Tensor, row_tokens: Tensor) -> Tensor:
    tokens, rows, samples, num_drafts = heads
    counts = torch.zeros_like(sampled)
    first = ((samples > 0) & (num_drafts >= 0) & (positions[tokens] >= 0)).nonzero()[:, 0]
    if not len(first):
        return counts
    number = torch.arange(MAX_SPAN, device=heads.device)
    mine = (first[:, None] + number).clamp(max=len(sampled) - 1)
    found = sampled[mine]
    drafts = (tokens[first][:, None] + 1 + number).clamp(max=len(token_ids) - 1)
    is_right = (number < num_drafts[first][:, None]) & (positions[drafts] >= 0) & (token_ids[drafts] == found)
    is_right &= sampled[(mine + 1).clamp(max=len(sampled) - 1)] >= 0
    count = 1 + is_right.long().cumprod(1).sum(1)
    counts[first] = count
    length = positions[tokens[first]] + 1
    row_tokens[rows[first], LENGTH] = length + count
    span, place = (number < count[:, None]).nonzero(as_tuple=True)
    row_tokens[rows[first][span], RECENT + (length[span] + place) % WINDOW] = found[span, place]
    return counts


@triton.jit
def _verify(
    heads, token_ids, positions, sampled, row_tokens, counts,
    MAX_SPAN: tl.constexpr, LENGTH: tl.constexpr, RECENT: tl.constexpr, WINDOW: tl.constexpr, COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAP)
    head, num_heads = tl.program_id(0), tl.num_programs(0)
    token = tl.load(heads + head)
    samples, num_drafts = tl.load(heads + 2 * num_heads + head), tl.load(heads + 3 * num_heads + head)
    position = tl.load(positions + token)
    if (samples == 0) | (num_drafts < 0) | (position < 0):
        tl.store(counts + head, 0)
        return
    number = tl.arange(0, MAX_SPAN)
    is_draft = number < num_drafts
    found = tl.load(sampled + head + number, mask=number <= num_drafts, other=0)
    draft = tl.load(token_ids + token + 1 + number, mask=is_draft, other=0)
    is_right = is_draft & (draft == found) & (tl.load(positions + token + 1 + number, mask=is_draft, other=-1) >= 0)
    is_right &= tl.load(sampled + head + 1 + number, mask=is_draft, other=-1) >= 0
    count = 1 + tl.min(tl.where(is_right, MAX_SPAN, number))
    tl.store(counts + head, count.to(tl.int64))
    mine = row_tokens + tl.load(heads + num_heads + head) * COLUMNS
    tl.store(mine + LENGTH, position + 1 + count)
    tl.store(mine + RECENT + (position + 1 + number) % WINDOW, found, mask=number < count)


def verify_triton(heads: Tensor, token_ids: Tensor, positions: Tensor, sampled: Tensor, row_tokens: Tensor) -> Tensor:
    counts = torch.empty_like(sampled)
    overlap = overlaps(token_ids)
    _verify[(len(sampled),)](
        heads, token_ids, positions, sampled, row_tokens, counts,
        MAX_SPAN=MAX_SPAN, LENGTH=LENGTH, RECENT=RECENT, WINDOW=WINDOW, COLUMNS=COLUMNS, OVERLAP=overlap, num_warps=1,
        launch_pdl=overlap,
    )  # fmt: skip
    return counts


def verify(heads: Tensor, token_ids: Tensor, positions: Tensor, sampled: Tensor, row_tokens: Tensor) -> Tensor:
    """Verify the drafts of a step whose tokens were sampled outside of it."""
    function = verify_triton if on_gpu(row_tokens) else verify_ref
    return function(heads, token_ids, positions, sampled, row_tokens)


@triton.jit
def _head_lengths(heads, positions, lengths, count, BLOCK: tl.constexpr):
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_head = number < count
    token = tl.load(heads + number, mask=is_head, other=0)
    samples = tl.load(heads + 2 * count + number, mask=is_head, other=0)
    position = tl.load(positions + token, mask=is_head, other=-1)
    tl.store(lengths + number, tl.where(samples > 0, position + 1, 0), mask=is_head)


def head_lengths_triton(heads: Tensor, positions: Tensor) -> Tensor:
    """Return the number of tokens before each sampled token; 0 where none is sampled."""
    count = heads.shape[1]
    lengths = heads.new_empty(count)
    block = min(256, next_power_of_2(count))
    _head_lengths[(-(-count // block),)](heads, positions, lengths, count, BLOCK=block, num_warps=1)
    return lengths


def head_lengths_ref(heads: Tensor, positions: Tensor) -> Tensor:
    return torch.where(heads[2] > 0, positions[heads[0]] + 1, 0)

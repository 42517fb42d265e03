# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The inputs of a draft model, after a step of the target model was sampled and verified.

next_tokens: the token that follows each token of the step
    token_rows, token_ids, positions [tokens]   heads [4, heads], sampled [heads]: see verify.py
    row_tokens: see row_tokens.py   -> [tokens]
draft_rows: the rows that go on drafting, in any order, and then padding
    heads, counts [heads]: see verify.py   positions [tokens]   num_rows: the number of rows, at most
    -> [3, num_rows]: the row, the step's token that was sampled last but one, and the row's new length. Padding: `padding`
    in place of the row, token 0, length 0

The last token of a span is followed by the one that was sampled for it, or by the next part of its prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.dispatch import next_power_of_2, on_gpu, tl, triton
from stoker.kernels.row_tokens import COLUMNS, NEXT


def next_tokens_ref(
    token_rows: Tensor, token_ids: Tensor, positions: Tensor, heads: Tensor, sampled: Tensor, row_tokens: Tensor
) -> Tensor:
    following = torch.arange(1, len(token_ids) + 1, device=token_ids.device).clamp(max=len(token_ids) - 1)
    is_next = (token_rows[following] == token_rows) & (positions[following] == positions + 1) & (positions >= 0)
    found = torch.where(is_next, token_ids[following], row_tokens[token_rows, NEXT])
    # What was sampled after a draft that does not exist is undefined.
    samples = (heads[2] > 0) & (sampled >= 0) & (positions[heads[0]] >= 0)
    # A token may be the head of padding too, so only heads that sample are written.
    return found.index_copy_(0, heads[0][samples], sampled[samples])


@triton.jit
def _next_tokens(
    token_rows, token_ids, positions, row_tokens, found, count,
    NEXT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, has_next = number < count, number + 1 < count
    position = tl.load(positions + number, mask=inside, other=-1)
    row = tl.load(token_rows + number, mask=inside, other=0)
    is_next = has_next & (position >= 0) & (tl.load(positions + number + 1, mask=has_next, other=-1) == position + 1)
    is_next &= tl.load(token_rows + number + 1, mask=has_next, other=0) == row
    prompt = tl.load(row_tokens + row * COLUMNS + NEXT, mask=inside, other=0)
    following = tl.load(token_ids + number + 1, mask=has_next, other=0)
    tl.store(found + number, tl.where(is_next, following, prompt), mask=inside)


@triton.jit
def _put_sampled(heads, sampled, positions, found, count, BLOCK: tl.constexpr):
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = number < count
    token_id = tl.load(sampled + number, mask=inside, other=-1)
    token = tl.load(heads + number, mask=inside, other=0)
    samples = (tl.load(heads + 2 * count + number, mask=inside, other=0) > 0) & (token_id >= 0)
    samples &= tl.load(positions + token, mask=inside, other=-1) >= 0
    tl.store(found + token, token_id, mask=samples)


def next_tokens_triton(
    token_rows: Tensor, token_ids: Tensor, positions: Tensor, heads: Tensor, sampled: Tensor, row_tokens: Tensor
) -> Tensor:
    found, count, num_heads = torch.empty_like(token_ids), len(token_ids), heads.shape[1]
    block = min(256, next_power_of_2(count))
    _next_tokens[(-(-count // block),)](
        token_rows, token_ids, positions, row_tokens, found, count, NEXT=NEXT, COLUMNS=COLUMNS, BLOCK=block, num_warps=1,
    )  # fmt: skip
    if num_heads:
        block = min(256, next_power_of_2(num_heads))
        _put_sampled[(-(-num_heads // block),)](heads, sampled, positions, found, num_heads, BLOCK=block, num_warps=1)
    return found


def next_tokens(
    token_rows: Tensor, token_ids: Tensor, positions: Tensor, heads: Tensor, sampled: Tensor, row_tokens: Tensor
) -> Tensor:
    run = next_tokens_triton if on_gpu(positions) else next_tokens_ref
    return run(token_rows, token_ids, positions, heads, sampled, row_tokens)


def draft_rows_ref(heads: Tensor, counts: Tensor, positions: Tensor, num_rows: int, padding: int) -> Tensor:
    first = (counts > 0).nonzero()[:num_rows, 0]
    found = heads.new_zeros(3, num_rows)
    found[0] = padding
    last = heads[0][first] + counts[first] - 1
    found[:, : len(first)] = torch.stack([heads[1][first], last, positions[heads[0][first]] + 1 + counts[first]])
    return found


@triton.jit
def _draft_rows(heads, counts, positions, found, num_heads, num_rows, padding, BLOCK: tl.constexpr):
    number = tl.arange(0, BLOCK)
    filled = 0
    for first in range(0, num_heads, BLOCK):
        head = first + number
        count = tl.load(counts + head, mask=head < num_heads, other=0)
        is_first = count > 0
        place = filled + tl.cumsum(is_first.to(tl.int32), 0) - 1
        is_mine = is_first & (place < num_rows)
        token = tl.load(heads + head, mask=is_mine, other=0)
        position = tl.load(positions + token, mask=is_mine, other=0)
        tl.store(found + place, tl.load(heads + num_heads + head, mask=is_mine, other=0), mask=is_mine)
        tl.store(found + num_rows + place, token + count - 1, mask=is_mine)
        tl.store(found + 2 * num_rows + place, position + 1 + count, mask=is_mine)
        filled += tl.sum(is_first.to(tl.int32))
    for first in range(0, num_rows, BLOCK):
        place = first + number
        is_padding = (place >= filled) & (place < num_rows)
        nothing = tl.zeros([BLOCK], tl.int64)
        tl.store(found + place, nothing + padding, mask=is_padding)
        tl.store(found + num_rows + place, nothing, mask=is_padding)
        tl.store(found + 2 * num_rows + place, nothing, mask=is_padding)


def draft_rows_triton(heads: Tensor, counts: Tensor, positions: Tensor, num_rows: int, padding: int) -> Tensor:
    found, num_heads = heads.new_empty(3, num_rows), heads.shape[1]
    block = min(1024, next_power_of_2(max(num_heads, num_rows)))
    _draft_rows[(1,)](heads, counts, positions, found, num_heads, num_rows, padding, BLOCK=block, num_warps=4)
    return found


def draft_rows(heads: Tensor, counts: Tensor, positions: Tensor, num_rows: int, padding: int) -> Tensor:
    return (draft_rows_triton if on_gpu(positions) else draft_rows_ref)(heads, counts, positions, num_rows, padding)

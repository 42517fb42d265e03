# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""A draft model that continues alone, one token per row at a time.

rows [3, rows]: from `draft_rows` (draft_inputs.py)   table [all rows, blocks + 1]: the blocks of each row, and in the last
    column how many of them there are   row_tokens: see row_tokens.py
number [1]: which guess it is. It is on the device, so that one captured graph makes any number of guesses
draft_step: the inputs of the draft model for its guess `number`, from 1 on
    -> positions [rows] of its input (-1 is padding), lengths [rows]: the tokens before the guess (0 is padding),
    slots [rows * kv_heads]: see ForwardBatch, pieces [rows, FIELDS]: see pieces.py
put_draft: puts guess `number` into the table. sampled [rows]: undefined where lengths [rows] is 0
    -> token_ids [rows]: the guesses, 0 without one

A row goes on only within its blocks: table entries beyond are an earlier owner's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stoker.kernels.dispatch import next_power_of_2, on_gpu, tl, triton
from stoker.kernels.pieces import FIELDS
from stoker.kernels.row_tokens import COLUMNS, MODEL, MODEL_DRAFTS, MODEL_START, NO_GUESS


class PageSizes(NamedTuple):
    """The shape of the draft model's KV."""

    num_kv_heads: int
    block_tokens: int
    pages_per_block: int


class DraftInputs(NamedTuple):
    positions: Tensor
    lengths: Tensor
    slots: Tensor
    pieces: Tensor


def draft_step_ref(rows: Tensor, table: Tensor, number: Tensor, sizes: PageSizes, num_positions: int) -> DraftInputs:
    row, _, length = rows
    position = length + (number - 2)
    end = (table[row, -1] * sizes.block_tokens).clamp(max=num_positions)
    is_there = (length > 0) & (position < end)
    position = position.where(is_there, -1)
    at = position.clamp(min=0)
    block = at // sizes.block_tokens
    pages = (table[row, block] * sizes.pages_per_block)[:, None] + torch.arange(sizes.num_kv_heads, device=row.device)
    slots = pages * sizes.block_tokens + (at % sizes.block_tokens)[:, None]
    index, one = torch.arange(len(row), device=row.device), torch.ones_like(row)
    pieces = torch.stack([index, is_there.long(), one - 1, block + 1, index, one], 1)
    return DraftInputs(position, torch.where(is_there, length + number, 0), slots.flatten(), pieces)


@triton.jit
def _draft_step(
    rows, table, which, positions, lengths, slots, pieces, count, table_width, pages_per_block, num_positions,
    KV_HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, BLOCK_TOKENS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row, length, number = tl.load(rows + index), tl.load(rows + 2 * count + index), tl.load(which)
    position = length + number - 2
    blocks = table + row * table_width
    end = tl.minimum(tl.load(blocks + table_width - 1) * BLOCK_TOKENS, num_positions)
    is_there = (length > 0) & (position < end)
    tl.store(positions + index, tl.where(is_there, position, -1))
    tl.store(lengths + index, tl.where(is_there, length + number, 0))
    at = tl.where(is_there, position, 0)
    block = at // BLOCK_TOKENS
    head = tl.arange(0, HEADS_PADDED)
    slot = (tl.load(blocks + block) * pages_per_block + head) * BLOCK_TOKENS + at % BLOCK_TOKENS
    tl.store(slots + index * KV_HEADS + head, slot, mask=head < KV_HEADS)
    piece = pieces + index * FIELDS
    tl.store(piece, index)
    tl.store(piece + 1, is_there.to(tl.int64))
    tl.store(piece + 2, index * 0)
    tl.store(piece + 3, block + 1)
    tl.store(piece + 4, index)
    tl.store(piece + 5, index * 0 + 1)


def draft_step_triton(rows: Tensor, table: Tensor, number: Tensor, sizes: PageSizes, num_positions: int) -> DraftInputs:
    count = rows.shape[1]
    made = DraftInputs(
        rows.new_empty(count),
        rows.new_empty(count),
        rows.new_empty(count * sizes.num_kv_heads),
        rows.new_empty(count, FIELDS),
    )
    _draft_step[(count,)](
        rows, table, number, *made, count, table.stride(0), sizes.pages_per_block, num_positions,
        KV_HEADS=sizes.num_kv_heads, HEADS_PADDED=next_power_of_2(sizes.num_kv_heads), BLOCK_TOKENS=sizes.block_tokens,
        FIELDS=FIELDS, num_warps=1,
    )  # fmt: skip
    return made


def draft_step(rows: Tensor, table: Tensor, number: Tensor, sizes: PageSizes, num_positions: int) -> DraftInputs:
    return (draft_step_triton if on_gpu(rows) else draft_step_ref)(rows, table, number, sizes, num_positions)


def put_draft_ref(
    rows: Tensor, lengths: Tensor, sampled: Tensor, row_tokens: Tensor, number: Tensor, vocab_size: int
) -> Tensor:
    row, is_there, column = rows[0], lengths > 0, MODEL + int(number)
    token_ids = sampled.clamp(0, vocab_size - 1).where(is_there, 0)
    if column == MODEL:
        row_tokens[row, MODEL_START] = rows[2]
    row_tokens[row, column] = torch.where(is_there, token_ids, NO_GUESS)
    row_tokens[row, column + 1 : MODEL + MODEL_DRAFTS] = NO_GUESS
    return token_ids


@triton.jit
def _put_draft(
    rows, lengths, sampled, row_tokens, which, token_ids, count, vocab_size,
    MODEL_START: tl.constexpr, MODEL: tl.constexpr, MODEL_DRAFTS: tl.constexpr, COLUMNS: tl.constexpr,
    NO_GUESS: tl.constexpr,
):  # fmt: skip
    index, number = tl.program_id(0), tl.load(which)
    is_there = tl.load(lengths + index) > 0
    token_id = tl.minimum(tl.maximum(tl.load(sampled + index), 0), vocab_size - 1)
    mine = row_tokens + tl.load(rows + index) * COLUMNS
    if number == 0:
        tl.store(mine + MODEL_START, tl.load(rows + 2 * count + index))
    column = tl.arange(0, MODEL_DRAFTS)
    guess = tl.where((column == number) & is_there, token_id, NO_GUESS)
    tl.store(mine + MODEL + column, guess, mask=column >= number)
    tl.store(token_ids + index, tl.where(is_there, token_id, 0))


def put_draft_triton(
    rows: Tensor, lengths: Tensor, sampled: Tensor, row_tokens: Tensor, number: Tensor, vocab_size: int
) -> Tensor:
    token_ids, count = torch.empty_like(sampled), rows.shape[1]
    _put_draft[(count,)](
        rows, lengths, sampled, row_tokens, number, token_ids, count, vocab_size,
        MODEL_START=MODEL_START, MODEL=MODEL, MODEL_DRAFTS=MODEL_DRAFTS, COLUMNS=COLUMNS, NO_GUESS=NO_GUESS, num_warps=1,
    )  # fmt: skip
    return token_ids


def put_draft(
    rows: Tensor, lengths: Tensor, sampled: Tensor, row_tokens: Tensor, number: Tensor, vocab_size: int
) -> Tensor:
    run = put_draft_triton if on_gpu(rows) else put_draft_ref
    return run(rows, lengths, sampled, row_tokens, number, vocab_size)

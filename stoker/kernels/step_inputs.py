# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Builds the inputs of a step from the tables on the device.

step [3, tokens]: each token's row, id and position (-1: padding). An id of -1 is the row's last known token, and -1 - j its
    j-th draft. Their positions follow from the row's length; those in `step` are upper bounds.
row_tokens [all rows, COLUMNS]: see row_tokens.py   table [all rows, blocks]
-> token_ids [tokens], positions [tokens], slots [tokens * kv_heads]: see ForwardBatch

Drafts are taken from the row's tape, if the tape agrees with all tokens that are known by now and goes on after them. If not,
they are taken from the draft model's guesses. Without a guess, and beyond the row's limit, a token becomes padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.dispatch import next_power_of_2, tl, triton
from stoker.kernels.row_tokens import (
    COLUMNS,
    LENGTH,
    LIMIT,
    MODEL,
    MODEL_DRAFTS,
    MODEL_START,
    NO_GUESS,
    RECENT,
    TAPE,
    TAPE_START,
    WINDOW,
)


def step_tokens_ref(step: Tensor, row_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens' ids and positions."""
    rows, token_ids, positions = step
    mine = row_tokens[rows]
    length, limit, start = mine[:, LENGTH], mine[:, LIMIT], mine[:, TAPE_START]
    recent, tape = mine[:, RECENT : RECENT + WINDOW], mine[:, TAPE : TAPE + WINDOW]
    at = length - 2 - token_ids  # for ids below zero
    guessed = start[:, None] + torch.arange(WINDOW, device=step.device)
    agrees = (tape < 0) | (guessed >= length[:, None]) | (tape == recent.gather(1, guessed % WINDOW))
    is_tape = agrees.all(1) & (_guess(tape, length - start) != NO_GUESS)
    from_model = _guess(mine[:, MODEL : MODEL + MODEL_DRAFTS], at - length)
    guess = _guess(tape, at - start).where(is_tape, from_model.where(mine[:, MODEL_START] == length, NO_GUESS))
    has_guess = guess != NO_GUESS
    last = recent.gather(1, ((length - 1) % WINDOW)[:, None])[:, 0]
    is_last, is_draft = token_ids == -1, token_ids < -1
    is_there = (positions >= 0) & ((at <= limit - 2) & (is_last | has_guess) | (token_ids >= 0))
    found = torch.where(is_last, last, torch.where(guess < 0, ~guess, guess).where(is_draft & has_guess, token_ids))
    return found.where(is_there, 0), torch.where(token_ids < 0, at, positions).where(is_there, -1)


def _guess(guesses: Tensor, index: Tensor) -> Tensor:
    """Return one guess of each row."""
    found = guesses.gather(1, index.clamp(0, guesses.shape[1] - 1)[:, None])[:, 0]
    return found.where((index >= 0) & (index < guesses.shape[1]), NO_GUESS)


def step_inputs_ref(
    step: Tensor, row_tokens: Tensor, table: Tensor, num_kv_heads: int, block_tokens: int, pages_per_block: int
) -> tuple[Tensor, Tensor, Tensor]:
    token_ids, positions = step_tokens_ref(step, row_tokens)
    at = positions.clamp(min=0)
    first_page = table[step[0], at // block_tokens].long() * pages_per_block
    pages = first_page[:, None] + torch.arange(num_kv_heads, device=step.device)
    return token_ids, positions, (pages * block_tokens + (at % block_tokens)[:, None]).flatten()


@triton.jit
def _step_inputs(
    step, row_tokens, table, token_ids, positions, slots, table_width, pages_per_block,
    KV_HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    LENGTH: tl.constexpr, LIMIT: tl.constexpr, TAPE_START: tl.constexpr, RECENT: tl.constexpr, TAPE: tl.constexpr,
    WINDOW: tl.constexpr, MODEL_START: tl.constexpr, MODEL: tl.constexpr, MODEL_DRAFTS: tl.constexpr,
    COLUMNS: tl.constexpr, NO_GUESS: tl.constexpr,
):  # fmt: skip
    number, count = tl.program_id(0), tl.num_programs(0)
    row = tl.load(step + number)
    token_id = tl.load(step + count + number)
    position = tl.load(step + 2 * count + number)
    if (token_id < 0) & (position >= 0):
        mine = row_tokens + row * COLUMNS
        length = tl.load(mine + LENGTH)
        position = length - 2 - token_id
        is_there = position <= tl.load(mine + LIMIT) - 2
        if token_id == -1:
            token_id = tl.load(mine + RECENT + (length - 1) % WINDOW)
        else:
            start = tl.load(mine + TAPE_START)
            column = tl.arange(0, WINDOW)
            tape = tl.load(mine + TAPE + column)
            known = tl.load(mine + RECENT + (start + column) % WINDOW)
            differs = (tape >= 0) & (start + column < length) & (tape != known)
            is_next = (column == length - start) & (tape != NO_GUESS)
            is_tape = (tl.sum(differs.to(tl.int32)) == 0) & (tl.sum(is_next.to(tl.int32)) == 1)
            drafted = tl.arange(0, MODEL_DRAFTS)
            drafts = tl.load(mine + MODEL + drafted)
            is_valid = (tl.load(mine + MODEL_START) == length) & (drafts != NO_GUESS) & (is_tape == 0)
            # One of the sums has one term. Without one, there is no guess.
            from_tape = (column == position - start) & (tape != NO_GUESS) & is_tape
            from_model = (drafted == position - length) & is_valid
            guess = tl.sum(tl.where(from_tape, tape, 0)) + tl.sum(tl.where(from_model, drafts, 0))
            is_there &= tl.sum(from_tape.to(tl.int32)) + tl.sum(from_model.to(tl.int32)) == 1
            token_id = tl.where(guess < 0, ~guess, guess)
        token_id = tl.where(is_there, token_id, 0)
        position = tl.where(is_there, position, -1)
    tl.store(token_ids + number, tl.where(position < 0, 0, token_id))
    tl.store(positions + number, position)
    position = tl.maximum(position, 0)
    block = tl.load(table + row * table_width + position // BLOCK_TOKENS).to(tl.int64)
    head = tl.arange(0, HEADS_PADDED)
    slot = (block * pages_per_block + head) * BLOCK_TOKENS + position % BLOCK_TOKENS
    tl.store(slots + number * KV_HEADS + head, slot, mask=head < KV_HEADS)


def step_inputs_triton(
    step: Tensor, row_tokens: Tensor, table: Tensor, num_kv_heads: int, block_tokens: int, pages_per_block: int
) -> tuple[Tensor, Tensor, Tensor]:
    count = step.shape[1]
    token_ids, positions, slots = step.new_empty(count), step.new_empty(count), step.new_empty(count * num_kv_heads)
    _step_inputs[(count,)](
        step, row_tokens, table, token_ids, positions, slots, table.stride(0), pages_per_block,
        KV_HEADS=num_kv_heads, HEADS_PADDED=next_power_of_2(num_kv_heads), BLOCK_TOKENS=block_tokens, LENGTH=LENGTH,
        LIMIT=LIMIT, TAPE_START=TAPE_START, RECENT=RECENT, TAPE=TAPE, WINDOW=WINDOW, MODEL_START=MODEL_START,
        MODEL=MODEL, MODEL_DRAFTS=MODEL_DRAFTS, COLUMNS=COLUMNS, NO_GUESS=NO_GUESS,
        num_warps=1,
    )  # fmt: skip
    return token_ids, positions, slots

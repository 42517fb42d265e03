# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Builds the inputs of a step from the tables on the device.

step [3, tokens]: each token's row, its id (-1: the row's last sampled token), its position (-1: padding)
last_token [all rows]   table [all rows, blocks]   ->   token_ids [tokens], slots [tokens * kv_heads]: see ForwardBatch
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.dispatch import next_power_of_2, tl, triton


def step_inputs_ref(
    step: Tensor, last_token: Tensor, table: Tensor, num_kv_heads: int, block_tokens: int, pages_per_block: int
) -> tuple[Tensor, Tensor]:
    rows, token_ids, positions = step
    token_ids = torch.where(token_ids < 0, last_token[rows], token_ids)
    at = positions.clamp(min=0)
    first_page = table[rows, at // block_tokens].long() * pages_per_block
    pages = first_page[:, None] + torch.arange(num_kv_heads, device=step.device)
    return token_ids, (pages * block_tokens + (at % block_tokens)[:, None]).flatten()


@triton.jit
def _step_inputs(
    step, last_token, table, token_ids, slots, table_width, pages_per_block,
    KV_HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    number, count = tl.program_id(0), tl.num_programs(0)
    row = tl.load(step + number)
    token_id = tl.load(step + count + number)
    sampled = tl.load(last_token + row)
    tl.store(token_ids + number, tl.where(token_id < 0, sampled, token_id))
    position = tl.maximum(tl.load(step + 2 * count + number), 0)
    block = tl.load(table + row * table_width + position // BLOCK_TOKENS).to(tl.int64)
    head = tl.arange(0, HEADS_PADDED)
    slot = (block * pages_per_block + head) * BLOCK_TOKENS + position % BLOCK_TOKENS
    tl.store(slots + number * KV_HEADS + head, slot, mask=head < KV_HEADS)


def step_inputs_triton(
    step: Tensor, last_token: Tensor, table: Tensor, num_kv_heads: int, block_tokens: int, pages_per_block: int
) -> tuple[Tensor, Tensor]:
    num_rows = step.shape[1]
    token_ids, slots = step.new_empty(num_rows), step.new_empty(num_rows * num_kv_heads)
    _step_inputs[(num_rows,)](
        step, last_token, table, token_ids, slots, table.stride(0), pages_per_block,
        KV_HEADS=num_kv_heads, HEADS_PADDED=next_power_of_2(num_kv_heads), BLOCK_TOKENS=block_tokens, num_warps=1,
    )  # fmt: skip
    return token_ids, slots

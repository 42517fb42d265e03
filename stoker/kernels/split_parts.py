# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Merges the parts of latent attention whose keys were split among several programs, on a rank that holds a part of the
context.

q [tokens, heads, latent], sums [tokens, heads]: the merged result and the logarithm to base 2 of its sum of weights. Unlike
paged_parts.py, this also returns the sums, because the ranks' results are merged after it. A row may see no key at all: its
sum is minus infinity, and its result zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.dispatch import overlaps, tl, triton, wait_for_inputs
from stoker.kernels.paged import max_parts
from stoker.kernels.pieces import FIELDS


def merge_parts(parts: list[Tensor], sums: list[Tensor]) -> Tensor:
    """Return the attention over all keys, from the parts [..., latent] of some of them and their sums [...]. They are merged
    in their order, in the dtype of the sums. A row that sees no key is zero."""
    largest = torch.stack(sums).amax(0)
    shift = largest.where(largest > float("-inf"), 0.0)
    total, found = torch.zeros_like(shift), torch.zeros_like(parts[0], dtype=shift.dtype)
    for part, own_sum in zip(parts, sums, strict=True):
        weight = torch.exp2(own_sum - shift)
        total += weight
        found += part.to(shift.dtype) * weight[..., None]
    return found / total.where(total > 0, 1.0)[..., None]


@triton.jit
def _join_split(
    q, sums, positions, pieces, parts, part_sums,
    TILES: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, LATENT: tl.constexpr, TOKENS: tl.constexpr,
    FIELDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    number, tile, place_in_piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    piece = pieces + number * FIELDS
    first, count = tl.load(piece).to(tl.int64), tl.load(piece + 1).to(tl.int32)
    group, num_parts = tl.load(piece + 4).to(tl.int32), tl.load(piece + 5).to(tl.int32)
    wait_for_inputs(OVERLAP)
    if (place_in_piece >= count) | (number != group) | (num_parts == 1):
        return
    token = first + place_in_piece
    row, column = tl.arange(0, ROWS), tl.arange(0, LATENT)
    is_mine = (row < SHARED) & (row * 0 + tl.load(positions + token).to(tl.int32) >= 0)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, LATENT], tl.float32)
    for other in range(group, group + num_parts):
        theirs = ((other * TILES + tile) * TOKENS + place_in_piece) * ROWS + row
        part = tl.load(parts + theirs[:, None] * LATENT + column[None, :], mask=is_mine[:, None], other=0.0)
        part_sum = tl.load(part_sums + theirs, mask=is_mine, other=0.0)
        new_largest = tl.maximum(largest, part_sum)
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        fade, weight = tl.exp2(largest - shift), tl.exp2(part_sum - shift)
        total = total * fade + weight
        found = found * fade[:, None] + part * weight[:, None]
        largest = new_largest
    total = tl.where(total == 0.0, 1.0, total)
    head = (token * TILES + tile) * SHARED + row
    tl.store(q + head[:, None] * LATENT + column[None, :], (found / total[:, None]).to(q.dtype.element_ty),
             mask=is_mine[:, None])  # fmt: skip
    tl.store(sums + head, largest + tl.log2(total), mask=is_mine)


def join_split(
    q: Tensor,
    sums: Tensor,
    positions: Tensor,
    pieces: Tensor,
    parts: tuple[Tensor, Tensor],
    shared: int,
    rows: int,
    tokens: int,
    programs: int,
) -> None:
    """Merge the parts of the pieces of up to `tokens` tokens. Each token has tiles of `shared` heads, in `rows` rows."""
    num_heads, latent = q.shape[1:]
    num_tiles, overlap = num_heads // shared, overlaps(q)
    _join_split[(max_parts(len(pieces), programs, num_tiles), num_tiles, tokens)](
        q, sums, positions, pieces, *parts, TILES=num_tiles, SHARED=shared, ROWS=rows, LATENT=latent, TOKENS=tokens,
        FIELDS=FIELDS, OVERLAP=overlap, num_warps=8, launch_pdl=overlap,
    )  # fmt: skip

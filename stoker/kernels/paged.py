# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Attention over the paged cache, in Triton.  q [tokens, heads, head_dim]   pages [pages, block_tokens * head_dim]   -> like q

The query heads of one KV head stand together as the rows of a tile, so that K and V are read once for all of them. Spans of
one token split their keys over several programs where there would be too few, and the last of these to finish puts the parts
together. Longer spans go in tiles of tokens. attention.py is the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import e, log2

import torch
from torch import Tensor

from stoker.kernels.dispatch import is_power_of_2, overlaps, tl, triton, use_triton, wait_for_inputs
from stoker.kernels.transfer import to_device

_LOG2_E = log2(e)
# Programs that keep a large card busy when each reads its part of the keys; and into how many parts keys are split at most.
_ENOUGH_PROGRAMS, _MOST_SPLITS = 512, 32
_LEAST_DOT = 16  # the matrix units' smallest tile
# Longer spans are cut into tiles of so many tokens, and those into pieces of so many rows: tokens times query heads.
_TILE_TOKENS, _TILE_ROWS, _WIDE_TILE_ROWS = 128, 128, 32
_SINGLE_WARPS, _SINGLE_STAGES, _TILE_WARPS, _TILE_STAGES = 2, 3, 4, 3


@dataclass(frozen=True, slots=True)
class PagedSpans:
    """What attends to what, on the device."""

    table: Tensor  # [rows, blocks] each row's blocks
    token_rows: Tensor  # [tokens] each token's row of the table
    positions: Tensor  # [tokens], -1 is padding
    singles: Tensor  # which tokens are a span of one
    tiles: Tensor  # [tiles, 2] first token and count: the spans of more, cut into pieces
    finished: Tensor  # `new_counters`: zeros before a call and after it; calls on it run one after the other
    pages_per_block: int
    num_kv_heads: int


def fits(x: Tensor, block_tokens: int, head_dim: int) -> bool:
    is_tile = is_power_of_2(block_tokens) and is_power_of_2(head_dim)
    return use_triton(x) and is_tile and _LEAST_DOT <= block_tokens <= 128 and _LEAST_DOT <= head_dim <= 256


def new_counters(device: torch.device) -> Tensor:
    return torch.zeros(_ENOUGH_PROGRAMS, dtype=torch.int32, device=device)


def paged_spans(
    spans: Sequence[tuple[int, int]],
    table: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    finished: Tensor,
    pages_per_block: int,
    num_kv_heads: int,
) -> PagedSpans:
    """`spans`: (first token, count)."""
    singles = to_device([first for first, count in spans if count == 1], table.device, torch.int32)
    tiles = [
        (first + offset, min(_TILE_TOKENS, count - offset))
        for first, count in spans
        if count > 1
        for offset in range(0, count, _TILE_TOKENS)
    ]
    # The last tiles of a span see the most keys: they come first, so that none of them is alone at the end.
    flat = [number for tile in reversed(tiles) for number in tile]
    on_device = to_device(flat, table.device, torch.int32).view(-1, 2)
    return PagedSpans(table, token_rows, positions, singles, on_device, finished, pages_per_block, num_kv_heads)


@triton.jit
def _attend_single(
    q, pages, table, token_rows, positions, singles, out, parts, part_sums, finished, scale, table_width, pages_per_block,
    KV_HEADS: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    number, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # The tables are the step's own inputs: they were there before its first kernel.
    token = tl.load(singles + number).to(tl.int64)
    position = tl.load(positions + token).to(tl.int32)
    num_blocks = (position + BLOCK) // BLOCK
    per_split = tl.cdiv(num_blocks, SPLITS)
    begin = split * per_split
    end = tl.minimum(begin + per_split, num_blocks)
    if begin >= end:
        return
    num_splits = tl.cdiv(num_blocks, per_split)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    key = tl.arange(0, BLOCK)
    is_head = (row < SHARED)[:, None]
    place = (token * KV_HEADS + head) * SHARED * DIM + row[:, None] * DIM + column[None, :]
    blocks = table + tl.load(token_rows + token).to(tl.int64) * table_width
    wait_for_inputs(OVERLAP)
    query = tl.load(q + place, mask=is_head, other=0.0)
    inside_page = key[:, None] * DIM + column[None, :]
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, DIM], tl.float32)
    for number_of_block in range(begin, end):
        block = tl.load(blocks + number_of_block).to(tl.int64)
        page = pages + (block * pages_per_block + head) * (BLOCK * DIM)
        is_seen = number_of_block * BLOCK + key <= position
        keys = tl.load(page + inside_page, mask=is_seen[:, None], other=0.0)
        values = tl.load(page + KV_HEADS * BLOCK * DIM + inside_page, mask=is_seen[:, None], other=0.0)
        score = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        score = tl.where(is_seen[None, :], score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, 1))
        weight = tl.exp2(score - new_largest[:, None])
        fade = tl.exp2(largest - new_largest)
        total = total * fade + tl.sum(weight, 1)
        found = found * fade[:, None] + tl.dot(weight.to(values.dtype), values, input_precision="ieee")
        largest = new_largest
    found = found / total[:, None]
    if SPLITS == 1 or num_splits == 1:
        tl.store(out + place, found.to(out.dtype.element_ty), mask=is_head)
    else:
        group = number * KV_HEADS + head
        mine = (group * SPLITS + split) * ROWS + row
        tl.store(parts + mine[:, None] * DIM + column[None, :], found)
        tl.store(part_sums + mine, largest + tl.log2(total))
        tl.debug_barrier()  # all of this program's parts are written before it counts itself as finished
        if tl.atomic_add(finished + group, 1, sem="acq_rel") == num_splits - 1:
            tl.store(finished + group, 0)
            largest = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            found = tl.zeros([ROWS, DIM], tl.float32)
            for other in range(num_splits):
                theirs = (group * SPLITS + other) * ROWS + row
                part = tl.load(parts + theirs[:, None] * DIM + column[None, :], cache_modifier=".cg")
                part_sum = tl.load(part_sums + theirs, cache_modifier=".cg")
                new_largest = tl.maximum(largest, part_sum)
                fade, weight = tl.exp2(largest - new_largest), tl.exp2(part_sum - new_largest)
                total = total * fade + weight
                found = found * fade[:, None] + part * weight[:, None]
                largest = new_largest
            tl.store(out + place, (found / total[:, None]).to(out.dtype.element_ty), mask=is_head)


@triton.jit
def _attend_tile(
    q, pages, table, token_rows, positions, tiles, out, scale, table_width, pages_per_block,
    KV_HEADS: tl.constexpr, SHARED: tl.constexpr, SHARED_PADDED: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(0), tl.program_id(1) // PIECES
    offset = (PIECES - 1 - tl.program_id(1) % PIECES) * TOKENS
    first = tl.load(tiles + 2 * tile).to(tl.int64) + offset
    count = tl.load(tiles + 2 * tile + 1) - offset
    if count <= 0:
        return
    count = tl.minimum(count, TOKENS)
    start = tl.load(positions + first).to(tl.int32)
    row = tl.arange(0, TOKENS * SHARED_PADDED)
    column = tl.arange(0, DIM)
    token, shared = row // SHARED_PADDED, row % SHARED_PADDED
    position = start + token
    is_mine = ((token < count) & (shared < SHARED))[:, None]
    place = (((first + token) * KV_HEADS + head) * SHARED + shared)[:, None] * DIM + column[None, :]
    query = tl.load(q + place, mask=is_mine, other=0.0)
    blocks = table + tl.load(token_rows + first).to(tl.int64) * table_width
    inside_page = tl.arange(0, BLOCK)[:, None] * DIM + column[None, :]
    largest = tl.full([TOKENS * SHARED_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS * SHARED_PADDED], tl.float32)
    found = tl.zeros([TOKENS * SHARED_PADDED, DIM], tl.float32)
    num_whole = (start + 1) // BLOCK * BLOCK  # keys that every token of the tile sees, in whole steps
    for begin in range(0, num_whole, BLOCK):
        block = tl.load(blocks + begin // BLOCK).to(tl.int64)
        page = pages + (block * pages_per_block + head) * (BLOCK * DIM) + inside_page
        keys = tl.load(page)
        values = tl.load(page + KV_HEADS * BLOCK * DIM)
        score = tl.dot(query, tl.trans(keys), input_precision="ieee")
        new_largest = tl.maximum(largest, tl.max(score, 1) * scale)
        weight = tl.exp2(score * scale - new_largest[:, None])
        fade = tl.exp2(largest - new_largest)
        total = total * fade + tl.sum(weight, 1)
        found = found * fade[:, None]
        found = tl.dot(weight.to(values.dtype), values, found, input_precision="ieee")
        largest = new_largest
    for begin in range(num_whole, start + count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        is_there = at < start + count
        block = tl.load(blocks + begin // BLOCK).to(tl.int64)
        page = pages + (block * pages_per_block + head) * (BLOCK * DIM) + inside_page
        keys = tl.load(page, mask=is_there[:, None], other=0.0)
        values = tl.load(page + KV_HEADS * BLOCK * DIM, mask=is_there[:, None], other=0.0)
        score = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        score = tl.where(at[None, :] <= position[:, None], score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, 1))
        weight = tl.exp2(score - new_largest[:, None])
        fade = tl.exp2(largest - new_largest)
        total = total * fade + tl.sum(weight, 1)
        found = found * fade[:, None]
        found = tl.dot(weight.to(values.dtype), values, found, input_precision="ieee")
        largest = new_largest
    tl.store(out + place, (found / total[:, None]).to(out.dtype.element_ty), mask=is_mine)


def num_splits(num_singles: int, num_kv_heads: int) -> int:
    """For so many spans of one token. A function of the batch alone: a captured graph has it for good."""
    return max(1, min(_MOST_SPLITS, _ENOUGH_PROGRAMS // (num_singles * num_kv_heads)))


def paged_attention_triton(q: Tensor, pages: Tensor, spans: PagedSpans, scale: float) -> Tensor:
    assert q.is_contiguous()
    out = torch.empty_like(q)
    num_heads, head_dim = q.shape[1:]
    kv_heads, block_tokens = spans.num_kv_heads, pages.shape[1] // head_dim
    shared = num_heads // kv_heads
    common = (scale * _LOG2_E, spans.table.stride(0), spans.pages_per_block)
    where = (q, pages, spans.table, spans.token_rows, spans.positions)
    overlap = overlaps(q)
    if len(spans.singles):
        singles, rows = len(spans.singles), max(_LEAST_DOT, _padded(shared))
        splits = num_splits(singles, kv_heads)
        groups = singles * kv_heads
        num_parts = groups * splits if splits > 1 else 0
        parts = q.new_empty(num_parts, rows, head_dim, dtype=torch.float32)
        part_sums = q.new_empty(num_parts, rows, dtype=torch.float32)
        _attend_single[(singles, kv_heads, splits)](
            *where, spans.singles, out, parts, part_sums, spans.finished, *common,
            KV_HEADS=kv_heads, SHARED=shared, ROWS=rows, DIM=head_dim, BLOCK=block_tokens, SPLITS=splits,
            OVERLAP=overlap, num_warps=_SINGLE_WARPS, num_stages=_SINGLE_STAGES, launch_pdl=overlap,
        )  # fmt: skip
    if len(spans.tiles):
        is_wide = q.dtype == torch.float32
        tokens = max(1, (_WIDE_TILE_ROWS if is_wide else _TILE_ROWS) // _padded(shared))
        pieces = triton.cdiv(_TILE_TOKENS, tokens)
        _attend_tile[(kv_heads, len(spans.tiles) * pieces)](
            *where, spans.tiles, out, *common,
            KV_HEADS=kv_heads, SHARED=shared, SHARED_PADDED=_padded(shared), TOKENS=tokens, DIM=head_dim,
            BLOCK=block_tokens, PIECES=pieces,
            num_warps=_TILE_WARPS, num_stages=1 if is_wide else _TILE_STAGES if overlap else 2,
        )  # fmt: skip
    return out


def _padded(count: int) -> int:
    return 1 << (count - 1).bit_length()

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The pieces of attention: which rows and key blocks a program has, and the merging of partial results whose keys were
split among several programs (paged.py, paged_codes.py)."""

from __future__ import annotations

from stoker.kernels.dispatch import tl, triton, wait_for_inputs
from stoker.kernels.reach import first_seen, share_blocks


@triton.jit
def span_rows(
    positions, first, count, head,
    KV_HEADS: tl.constexpr, SHARED: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    GUARDED: tl.constexpr,
):  # fmt: skip
    """Return what the rows of a tile are in which each of up to TOKENS tokens of a span has its query heads: their
    numbers, positions, the last position, which rows exist, and the place of their first value in the query.

    With GUARDED, and with several tokens, those whose position is -1 are padding."""
    row = tl.arange(0, ROWS)
    if TOKENS == 1:
        last = tl.load(positions + first).to(tl.int32)
        position, is_row = row * 0 + last, row < SHARED
        if GUARDED:
            is_row = is_row & (position >= 0)
        return row, position, last, is_row, (first * KV_HEADS + head) * SHARED * DIM + row * DIM
    else:
        token, shared = row // (ROWS // TOKENS), row % (ROWS // TOKENS)
        position = tl.load(positions + first + token, mask=token < count, other=-1).to(tl.int32)
        place = (((first + token) * KV_HEADS + head) * SHARED + shared) * DIM
        return row, position, tl.max(position), (shared < SHARED) & (position >= 0), place


@triton.jit
def single_blocks(
    position, last, begin, end, part, num_parts,
    BLOCK: tl.constexpr, GUARDED: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, FIXED: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return what a piece of a decoding span reads: the first key that any of its rows sees, its key blocks, and the
    number of parts of its group. With FIXED, parts end where the host has cut them."""
    first = begin * 0
    if WINDOW + CHUNK > 0:
        lowest = tl.min(tl.where(position >= 0, position, 1 << 30))
        first = first_seen(lowest, WINDOW, CHUNK)
        if FIXED:
            begin, end = tl.maximum(begin, first // BLOCK), tl.minimum(end, (last + BLOCK) // BLOCK)
        else:
            begin, end, num_parts = share_blocks(first, last, part, num_parts, BLOCK, MIN_BLOCKS)
    elif GUARDED:
        end = tl.minimum(end, (last + BLOCK) // BLOCK)
    return first, begin, end, num_parts


@triton.jit
def tile_blocks(
    start, count, begin, end, part, num_parts,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, MIN_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return what a piece of a tile reads: the first key that any token sees, the first block that all tokens see from
    its first key on, its key blocks, and the number of parts of its group."""
    first, first_of_all = begin * 0, begin * 0
    if WINDOW + CHUNK > 0:
        last = start + count - 1
        first = first_seen(start, WINDOW, CHUNK)
        first_of_all = (first_seen(last, WINDOW, CHUNK) + BLOCK - 1) // BLOCK
        begin, end, num_parts = share_blocks(first, last, part, num_parts, BLOCK, MIN_BLOCKS)
    return first, first_of_all, begin, end, num_parts


@triton.jit
def start_sums(sinks, head, is_head, is_first, ROWS: tl.constexpr, SINKS: tl.constexpr):
    """Return the largest logit of each row and the sum of its weights before the first key. The first piece of a group
    has seen the sink of each head."""
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32) * 1.4426950408889634  # log2(e)
        largest = tl.where(is_first, sink, largest)
        total += tl.where(is_first, 1.0, 0.0)
    return largest, total


@triton.jit
def merge(parts, part_sums, group, num_parts, head, row, column, is_mine, KV_HEADS: tl.constexpr, ROWS: tl.constexpr,
          DIM: tl.constexpr):  # fmt: skip
    """Merge all parts of a group. A row may see no key of some parts."""
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, DIM], tl.float32)
    for number in range(group, group + num_parts):
        theirs = (number * KV_HEADS + head) * ROWS + row
        part = tl.load(parts + theirs[:, None] * DIM + column[None, :], mask=is_mine, other=0.0, cache_modifier=".cg")
        part_sum = tl.load(part_sums + theirs, cache_modifier=".cg")
        new_largest = tl.maximum(largest, part_sum)
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        fade, weight = tl.exp2(largest - shift), tl.exp2(part_sum - shift)
        total = total * fade + weight
        found = found * fade[:, None] + part * weight[:, None]
        largest = new_largest
    return found / total[:, None]


@triton.jit
def join_tiles(
    q, positions, pieces, parts, part_sums,
    KV_HEADS: tl.constexpr, SHARED: tl.constexpr, SHARED_PADDED: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    MIN_BLOCKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge some rows of a tile whose keys were split. A single program would take longer to read all parts than it
    took to compute them."""
    number, head = tl.program_id(0), tl.program_id(1)
    piece = pieces + number * FIELDS
    first, count = tl.load(piece).to(tl.int64), tl.load(piece + 1).to(tl.int32)
    group, num_parts = tl.load(piece + 4).to(tl.int32), tl.load(piece + 5).to(tl.int32)
    wait_for_inputs(OVERLAP)
    if (count == 0) | (number != group):
        return
    start = tl.load(positions + first).to(tl.int32)
    _key, _whole, _begin, _end, num_parts = tile_blocks(
        start, count, group, group, 0, num_parts, BLOCK, WINDOW, CHUNK, MIN_BLOCKS
    )
    if num_parts == 1:
        return
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DIM)
    token, shared = row // SHARED_PADDED, row % SHARED_PADDED
    is_mine = (token < count) & (shared < SHARED)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    for other in range(group, group + num_parts):
        theirs = (other * KV_HEADS + head) * (TOKENS * SHARED_PADDED) + row
        largest = tl.maximum(largest, tl.load(part_sums + theirs, mask=is_mine, other=0.0))
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, DIM], tl.float32)
    for other in range(group, group + num_parts):
        theirs = (other * KV_HEADS + head) * (TOKENS * SHARED_PADDED) + row
        weight = tl.exp2(tl.load(part_sums + theirs, mask=is_mine, other=0.0) - largest)
        part = tl.load(parts + theirs[:, None] * DIM + column[None, :], mask=is_mine[:, None], other=0.0)
        total += weight
        found += part * weight[:, None]
    place = (((first + token) * KV_HEADS + head) * SHARED + shared)[:, None] * DIM + column[None, :]
    tl.store(q + place, (found / total[:, None]).to(q.dtype.element_ty), mask=is_mine[:, None])

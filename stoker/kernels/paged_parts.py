# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Merges the partial results of attention whose keys were split among several programs (paged.py, paged_codes.py)."""

from __future__ import annotations

from stoker.kernels.dispatch import tl, triton, wait_for_inputs


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
def merge(parts, part_sums, group, num_parts, head, row, column, is_mine, KV_HEADS: tl.constexpr, ROWS: tl.constexpr,
          DIM: tl.constexpr):  # fmt: skip
    """Merge all parts of a group. Every row sees some of the keys of the first part."""
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, DIM], tl.float32)
    for number in range(group, group + num_parts):
        theirs = (number * KV_HEADS + head) * ROWS + row
        part = tl.load(parts + theirs[:, None] * DIM + column[None, :], mask=is_mine, other=0.0, cache_modifier=".cg")
        part_sum = tl.load(part_sums + theirs, cache_modifier=".cg")
        new_largest = tl.maximum(largest, part_sum)
        fade, weight = tl.exp2(largest - new_largest), tl.exp2(part_sum - new_largest)
        total = total * fade + weight
        found = found * fade[:, None] + part * weight[:, None]
        largest = new_largest
    return found / total[:, None]


@triton.jit
def join_tiles(
    q, pieces, parts, part_sums,
    KV_HEADS: tl.constexpr, SHARED: tl.constexpr, SHARED_PADDED: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, FIELDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge some rows of a tile whose keys were split. A single program would take longer to read all parts than it
    took to compute them."""
    number, head = tl.program_id(0), tl.program_id(1)
    piece = pieces + number * FIELDS
    first, count = tl.load(piece).to(tl.int64), tl.load(piece + 1).to(tl.int32)
    group, num_parts = tl.load(piece + 4).to(tl.int32), tl.load(piece + 5).to(tl.int32)
    wait_for_inputs(OVERLAP)
    if (count == 0) | (number != group) | (num_parts == 1):
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

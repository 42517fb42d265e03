# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Attention over pages of 8-bit values (kv_pages.py). paged.py launches these kernels in place of its own.

The tensor cores take 16-bit values from shared memory without a detour through other threads, but not 8-bit ones. So
pages are loaded as 16-bit words, of two neighbouring values each. The even values of a head and the odd ones are two
matmuls. Codes become float16 by a few bit operations. It holds them exactly; each row of the query is multiplied by a
power of two that brings it into float16's range.

The scales of keys multiply the scores. The scales of values multiply the weights, divided by the largest scale so far
(`unit`), so that they stay in the range of float16, too.
"""

from __future__ import annotations

from stoker.kernels.dispatch import tl, triton, wait_for_inputs
from stoker.kernels.kv_pages import load_scales
from stoker.kernels.paged_parts import merge, single_blocks, span_rows, start_sums, tile_blocks
from stoker.kernels.reach import first_seen


@triton.jit
def halves(words, dtype: tl.constexpr, INT8: tl.constexpr):
    """Return the low and the high bytes of 16-bit words as values, those of float8 times 2**-8."""
    if INT8:
        # The byte becomes the end of the mantissa of 1024.
        low = (((words & 0xFF) ^ 0x80) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
        high = ((words >> 8) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
    else:
        # The exponent of e4m3 becomes the end of float16's.
        up = words << 8
        low = ((up & 0x8000) | ((up & 0x7F00) >> 1)).to(tl.float16, bitcast=True)
        high = ((words & 0x8000) | ((words & 0x7F00) >> 1)).to(tl.float16, bitcast=True)
    return low.to(dtype), high.to(dtype)


@triton.jit
def load_query(place, is_mine, scale, INT8: tl.constexpr):
    """Return the even and the odd values of each row, in the dtype of the matmuls, and the factor of its scores."""
    even = tl.load(place, mask=is_mine, other=0.0).to(tl.float32)
    odd = tl.load(place + 1, mask=is_mine, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1)), 1e-30)
    exponent = largest.to(tl.uint32, bitcast=True) >> 23
    factor = (exponent << 23).to(tl.float32, bitcast=True) * scale * (1.0 if INT8 else 256.0)
    shrink = ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    even, odd = even * shrink, odd * shrink
    if place.dtype.element_ty != tl.float32:
        even, odd = even.to(tl.float16), odd.to(tl.float16)
    return even, odd, factor


@triton.jit
def _attend_block(
    page, is_there, is_seen, even, odd, factor, largest, total, unit, found_even, found_odd,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, INT8: tl.constexpr,
    MASKED: tl.constexpr, ROW_UNITS: tl.constexpr,
):  # fmt: skip
    """Add one block. `is_there` [BLOCK]: the keys that exist; `is_seen` [rows or 1, BLOCK]: those that each row sees.
    Neither is used unless MASKED. With ROW_UNITS, which needs MASKED, each row has a unit of its own, so that it does
    not depend on keys that only other rows see."""
    inside = tl.arange(0, BLOCK)[:, None] * (DIM // 2) + tl.arange(0, DIM // 2)[None, :]
    key_words = page.to(tl.pointer_type(tl.uint16)) + inside
    value_words = (page + KV_HEADS * PAGE).to(tl.pointer_type(tl.uint16)) + inside
    if MASKED:
        keys, values = (
            tl.load(key_words, mask=is_there[:, None], other=0),
            tl.load(value_words, mask=is_there[:, None], other=0),
        )
    else:
        keys, values = tl.load(key_words), tl.load(value_words)
    key_scale = load_scales(page + BLOCK * DIM, is_there, BLOCK)
    value_scale = load_scales(page + KV_HEADS * PAGE + BLOCK * DIM, is_there, BLOCK)
    key_even, key_odd = halves(tl.trans(keys), even.dtype, INT8)
    score = tl.dot(even, key_even, input_precision="ieee")
    score = tl.dot(odd, key_odd, score, input_precision="ieee")
    score = score * factor[:, None] * key_scale[None, :]
    if MASKED:
        score = tl.where(is_seen, score, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(score, 1))
    shift = new_largest
    if MASKED:  # some rows may see none of these keys
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weight = tl.exp2(score - shift[:, None])
    fade = tl.exp2(largest - shift)
    total = total * fade + tl.sum(weight, 1)
    if ROW_UNITS:
        seen_scale = tl.where(is_seen, value_scale[None, :], 0.0)
        new_unit = tl.maximum(unit, tl.max(seen_scale, 1))
        weight = (weight * (seen_scale / new_unit[:, None])).to(even.dtype)
    else:
        new_unit = tl.maximum(unit, tl.max(value_scale, 0))
        weight = (weight * (value_scale / new_unit)[None, :]).to(even.dtype)
    # The quotient of equal numbers may be rounded. A block that a row does not see has to leave the row's bits alone.
    fade = (fade * tl.where(unit == new_unit, 1.0, unit / new_unit))[:, None]
    value_even, value_odd = halves(values, even.dtype, INT8)
    found_even = tl.dot(weight, value_even, found_even * fade, input_precision="ieee")
    found_odd = tl.dot(weight, value_odd, found_odd * fade, input_precision="ieee")
    return new_largest, total, new_unit, found_even, found_odd


@triton.jit
def attend_single_codes(
    q, pages, table, token_rows, positions, sinks, pieces, parts, part_sums, finished, scale, table_width,
    pages_per_block,
    KV_HEADS: tl.constexpr, SHARED: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, FIELDS: tl.constexpr, GUARDED: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    FIXED: tl.constexpr, MIN_BLOCKS: tl.constexpr, SINKS: tl.constexpr, OVERLAP: tl.constexpr, PAGE: tl.constexpr,
    INT8: tl.constexpr,
):  # fmt: skip
    """Like `_attend_single` in paged.py."""
    head, number = tl.program_id(0), tl.program_id(1)
    piece = pieces + number * FIELDS
    token, count = tl.load(piece).to(tl.int64), tl.load(piece + 1)
    begin, end = tl.load(piece + 2).to(tl.int32), tl.load(piece + 3).to(tl.int32)
    group, num_parts = tl.load(piece + 4).to(tl.int32), tl.load(piece + 5).to(tl.int32)
    if count == 0:
        if number == 0:
            wait_for_inputs(OVERLAP)
        return
    row, position, last, is_row, first_value = span_rows(
        positions, token, count, head, KV_HEADS, SHARED, TOKENS, ROWS, DIM, GUARDED
    )
    even_column = 2 * tl.arange(0, DIM // 2)[None, :]
    is_head = is_row[:, None]
    place = first_value[:, None]
    blocks = table + tl.load(token_rows + token).to(tl.int64) * table_width
    first, begin, end, num_parts = single_blocks(
        position, last, begin, end, number - group, num_parts, BLOCK, GUARDED, WINDOW, CHUNK, FIXED, MIN_BLOCKS
    )
    if number - group >= num_parts:
        return
    wait_for_inputs(OVERLAP)
    even, odd, factor = load_query(q + place + even_column, is_head, scale, INT8)
    shared = row % (ROWS // TOKENS)
    largest, total = start_sums(sinks, head * SHARED + shared, shared < SHARED, number == group, ROWS, SINKS)
    if TOKENS > 1:
        unit = tl.full([ROWS], 1e-30, tl.float32)
    else:
        unit = 1e-30
    found_even, found_odd = tl.zeros([ROWS, DIM // 2], tl.float32), tl.zeros([ROWS, DIM // 2], tl.float32)
    for number_of_block in range(begin, end):
        block = tl.load(blocks + number_of_block).to(tl.int64)
        page = pages + (block * pages_per_block + head) * PAGE
        at = number_of_block * BLOCK + tl.arange(0, BLOCK)
        is_there = at <= last
        is_seen = at[None, :] <= position[:, None]
        if WINDOW + CHUNK > 0:
            is_there = is_there & (at >= first)
            is_seen = is_seen & (at[None, :] >= first_seen(position, WINDOW, CHUNK)[:, None])
        largest, total, unit, found_even, found_odd = _attend_block(
            page, is_there, is_seen, even, odd, factor, largest, total, unit, found_even, found_odd,
            KV_HEADS, DIM, BLOCK, PAGE, INT8, True, TOKENS > 1,
        )  # fmt: skip
    if GUARDED:
        total = tl.where(total == 0.0, 1.0, total)
        largest = tl.where(is_row, largest, 0.0)
    rest = (unit * (1.0 if INT8 else 256.0) / total)[:, None]
    found_even, found_odd = found_even * rest, found_odd * rest
    if num_parts == 1:
        tl.store(q + place + even_column, found_even.to(q.dtype.element_ty), mask=is_head)
        tl.store(q + place + even_column + 1, found_odd.to(q.dtype.element_ty), mask=is_head)
    else:
        mine = (number * KV_HEADS + head) * ROWS + row
        part = parts + mine[:, None] * DIM + even_column
        tl.store(part, found_even, mask=is_head)
        tl.store(part + 1, found_odd, mask=is_head)
        tl.store(part_sums + mine, largest + tl.log2(total))
        tl.debug_barrier()
        counter = finished + group * KV_HEADS + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_parts - 1:
            tl.store(counter, 0)
            column = tl.arange(0, DIM)
            found = merge(parts, part_sums, group, num_parts, head, row, column, is_head, KV_HEADS, ROWS, DIM)
            tl.store(q + place + column[None, :], found.to(q.dtype.element_ty), mask=is_head)


@triton.jit
def attend_tile_codes(
    q, pages, table, token_rows, positions, sinks, pieces, parts, part_sums, scale, table_width, pages_per_block,
    KV_HEADS: tl.constexpr, SHARED: tl.constexpr, SHARED_PADDED: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, FIELDS: tl.constexpr, EXACT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    MIN_BLOCKS: tl.constexpr, SINKS: tl.constexpr, OVERLAP: tl.constexpr, PAGE: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Like `_attend_tile` in paged.py."""
    head, number = tl.program_id(0), tl.program_id(1)
    piece = pieces + number * FIELDS
    first, count = tl.load(piece).to(tl.int64), tl.load(piece + 1).to(tl.int32)
    begin, end = tl.load(piece + 2).to(tl.int32), tl.load(piece + 3).to(tl.int32)
    group, num_parts = tl.load(piece + 4).to(tl.int32), tl.load(piece + 5).to(tl.int32)
    if count == 0:
        if number == 0:
            wait_for_inputs(OVERLAP)
        return
    start = tl.load(positions + first).to(tl.int32)
    first_key, first_of_all, begin, end, num_parts = tile_blocks(
        start, count, begin, end, number - group, num_parts, BLOCK, WINDOW, CHUNK, MIN_BLOCKS
    )
    if number - group >= num_parts:
        return
    row = tl.arange(0, TOKENS * SHARED_PADDED)
    key = tl.arange(0, BLOCK)
    even_column = 2 * tl.arange(0, DIM // 2)[None, :]
    token, shared = row // SHARED_PADDED, row % SHARED_PADDED
    is_mine = ((token < count) & (shared < SHARED))[:, None]
    place = q + (((first + token) * KV_HEADS + head) * SHARED + shared)[:, None] * DIM + even_column
    blocks = table + tl.load(token_rows + first).to(tl.int64) * table_width
    wait_for_inputs(OVERLAP)
    even, odd, factor = load_query(place, is_mine, scale, INT8)
    largest, total = start_sums(
        sinks, head * SHARED + shared, shared < SHARED, number == group, TOKENS * SHARED_PADDED, SINKS
    )
    if EXACT:
        unit = tl.full([TOKENS * SHARED_PADDED], 1e-30, tl.float32)
    else:
        unit = 1e-30
    found_even = tl.zeros([TOKENS * SHARED_PADDED, DIM // 2], tl.float32)
    found_odd = tl.zeros([TOKENS * SHARED_PADDED, DIM // 2], tl.float32)
    whole_begin = tl.minimum(tl.maximum(first_of_all, begin), end)
    whole_end = tl.minimum(tl.maximum((start + 1) // BLOCK, whole_begin), end)
    everything = tl.full([BLOCK], 1, tl.int1)
    if EXACT:
        whole_begin, whole_end = begin, begin
    else:
        for number_of_block in range(whole_begin, whole_end):
            block = tl.load(blocks + number_of_block).to(tl.int64)
            page = pages + (block * pages_per_block + head) * PAGE
            largest, total, unit, found_even, found_odd = _attend_block(
                page, everything, everything, even, odd, factor, largest, total, unit, found_even, found_odd,
                KV_HEADS, DIM, BLOCK, PAGE, INT8, False, False,
            )  # fmt: skip
    for step in range(begin, end - (whole_end - whole_begin)):
        number_of_block = step + tl.where(step < whole_begin, 0, whole_end - whole_begin)
        at = number_of_block * BLOCK + key
        block = tl.load(blocks + number_of_block).to(tl.int64)
        page = pages + (block * pages_per_block + head) * PAGE
        is_there = at < start + count
        is_seen = at[None, :] <= (start + token)[:, None]
        if WINDOW + CHUNK > 0:
            is_there = is_there & (at >= first_key)
            is_seen = is_seen & (at[None, :] >= first_seen(start + token, WINDOW, CHUNK)[:, None])
        largest, total, unit, found_even, found_odd = _attend_block(
            page, is_there, is_seen, even, odd, factor, largest, total, unit, found_even, found_odd,
            KV_HEADS, DIM, BLOCK, PAGE, INT8, True, EXACT,
        )  # fmt: skip
    rest = (unit * (1.0 if INT8 else 256.0) / tl.where(total == 0.0, 1.0, total))[:, None]
    found_even, found_odd = found_even * rest, found_odd * rest
    if num_parts == 1:
        tl.store(place, found_even.to(q.dtype.element_ty), mask=is_mine)
        tl.store(place + 1, found_odd.to(q.dtype.element_ty), mask=is_mine)
    else:
        mine = (number * KV_HEADS + head) * (TOKENS * SHARED_PADDED) + row
        part = parts + mine[:, None] * DIM + even_column
        tl.store(part, found_even, mask=is_mine)
        tl.store(part + 1, found_odd, mask=is_mine)
        tl.store(part_sums + mine, largest + tl.log2(total))

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Latent attention over pages of 8-bit entries (latent_pages.py). mla.py launches this kernel in place of its own.

As in paged_codes.py, codes are loaded as 16-bit words, of two neighbouring values each: the even values of a latent and the
odd ones are two matmuls. The scale of a latent multiplies its part of the score, and its weight, divided by the largest
scale so far (`unit`). The rotated key is in bfloat16 and adds to the score by a matmul of its own.
"""

from __future__ import annotations

from stoker.kernels.dispatch import tl, triton, wait_for_inputs
from stoker.kernels.kv_pages import load_scales
from stoker.kernels.paged_codes import halves, load_query
from stoker.kernels.paged_parts import merge


@triton.jit
def attend_latent_codes(
    q, turned_q, pages, table, token_rows, positions, pieces, parts, part_sums, finished, sums, scale, table_width,
    pages_per_block, turned_head, context,
    TILES: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, TOKENS: tl.constexpr, MERGES: tl.constexpr, FIELDS: tl.constexpr,
    CONTEXTS: tl.constexpr, OVERLAP: tl.constexpr, PAGE: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Like `_attend_latent` in mla.py."""
    tile, number, place_in_piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    piece = pieces + number * FIELDS
    first, count = tl.load(piece).to(tl.int64), tl.load(piece + 1).to(tl.int32)
    begin, end = tl.load(piece + 2).to(tl.int32), tl.load(piece + 3).to(tl.int32)
    group, num_parts = tl.load(piece + 4).to(tl.int32), tl.load(piece + 5).to(tl.int32)
    if place_in_piece >= count:
        if number == 0:
            wait_for_inputs(OVERLAP)
        return
    token = first + place_in_piece
    position = tl.load(positions + token).to(tl.int32)
    row = tl.arange(0, ROWS)
    is_mine = (row < SHARED) & (row * 0 + position >= 0)
    is_row = is_mine[:, None]
    word, turned_column = tl.arange(0, LATENT // 2), tl.arange(0, ROPE)
    head = (token * TILES + tile) * SHARED + row
    place = head[:, None] * LATENT + 2 * word[None, :]
    blocks = table + tl.load(token_rows + token).to(tl.int64) * table_width
    # The keys of a token do not depend on the other tokens of its piece.
    end = tl.minimum(end, (position + BLOCK * CONTEXTS) // (BLOCK * CONTEXTS))
    wait_for_inputs(OVERLAP)
    even, odd, factor = load_query(q + place, is_row, scale, INT8)
    turned = tl.load(turned_q + head[:, None] * turned_head + turned_column[None, :], mask=is_row, other=0.0)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    unit = 1e-30
    found_even, found_odd = tl.zeros([ROWS, LATENT // 2], tl.float32), tl.zeros([ROWS, LATENT // 2], tl.float32)
    PER_BLOCK: tl.constexpr = BLOCK // KEYS
    for step in range(begin * PER_BLOCK, end * PER_BLOCK):
        page = pages + tl.load(blocks + step // PER_BLOCK).to(tl.int64) * pages_per_block * PAGE
        first_inside = (step % PER_BLOCK) * KEYS
        inside = first_inside + tl.arange(0, KEYS)
        at = step * KEYS + tl.arange(0, KEYS)
        if CONTEXTS > 1:  # BLOCK tokens of each block are on this rank
            at = (step // PER_BLOCK * CONTEXTS + context) * BLOCK + inside
        is_there = at <= position
        is_key = is_there[:, None]
        words = page.to(tl.pointer_type(tl.uint16)) + inside[:, None] * (LATENT // 2) + word[None, :]
        words = tl.load(words, mask=is_key, other=0)
        keys = (page + BLOCK * LATENT).to(tl.pointer_type(tl.bfloat16))
        keys = tl.load(keys + inside[:, None] * ROPE + turned_column[None, :], mask=is_key, other=0.0)
        key_scale = load_scales(page + BLOCK * (LATENT + 2 * ROPE) + 2 * first_inside, is_there, KEYS)
        latent_even, latent_odd = halves(words, even.dtype, INT8)
        score = tl.dot(even, tl.trans(latent_even), input_precision="ieee")
        score = tl.dot(odd, tl.trans(latent_odd), score, input_precision="ieee")
        score = score * factor[:, None] * key_scale[None, :]
        score += tl.dot(turned, tl.trans(keys.to(turned.dtype)), input_precision="ieee") * scale
        score = tl.where(is_there[None, :], score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, 1))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = tl.exp2(score - shift[:, None])
        fade = tl.exp2(largest - shift)
        total = total * fade + tl.sum(weight, 1)
        new_unit = tl.maximum(unit, tl.max(key_scale, 0))
        weight = (weight * (key_scale / new_unit)[None, :]).to(even.dtype)
        fade = (fade * (unit / new_unit))[:, None]
        found_even = tl.dot(weight, latent_even, found_even * fade, input_precision="ieee")
        found_odd = tl.dot(weight, latent_odd, found_odd * fade, input_precision="ieee")
        largest, unit = new_largest, new_unit
    total = tl.where(total == 0.0, 1.0, total)  # a part may have no key that the token sees
    largest = tl.where(is_mine, largest, 0.0)
    rest = (unit * (1.0 if INT8 else 256.0) / total)[:, None]
    found_even, found_odd = found_even * rest, found_odd * rest
    if num_parts == 1:
        tl.store(q + place, found_even.to(q.dtype.element_ty), mask=is_row)
        tl.store(q + place + 1, found_odd.to(q.dtype.element_ty), mask=is_row)
        if CONTEXTS > 1:
            tl.store(sums + head, largest + tl.log2(total), mask=is_mine)
    else:
        mine = ((number * TILES + tile) * TOKENS + place_in_piece) * ROWS + row
        part = parts + mine[:, None] * LATENT + 2 * word[None, :]
        tl.store(part, found_even, mask=is_row)
        tl.store(part + 1, found_odd, mask=is_row)
        tl.store(part_sums + mine, largest + tl.log2(total))
        if MERGES:
            tl.debug_barrier()  # all of this program's part is written before it counts as finished
            counter = finished + group * TILES + tile
            if tl.atomic_add(counter, 1, sem="acq_rel") == num_parts - 1:
                tl.store(counter, 0)
                column = tl.arange(0, LATENT)
                found = merge(parts, part_sums, group, num_parts, tile, row, column, is_row, TILES, ROWS, LATENT)
                tl.store(q + head[:, None] * LATENT + column[None, :], found.to(q.dtype.element_ty), mask=is_row)

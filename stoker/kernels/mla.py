# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Multi-head latent attention (MLA) over the paged KV cache.

q [tokens, heads, nope + rope]   pages: an entry of latent + rope values per token (latent_pages.py)
weight [heads, nope + value, latent]: what expands a latent to the k and v of each head   ->  [tokens, heads, value]

There are two ways to the same result. Absorbed: the query is multiplied by the weight's part for k, attends to the
latents themselves, and what it finds is multiplied by the part for v. Expanded: the latents of all keys are expanded
first, which pays for a span of many tokens. On a GPU, the kernel here computes the absorbed form for decoding,
verification and chunks of prompts; the first tokens of a prompt are expanded. With `exact`, everything is absorbed,
because the two forms round differently.

The kernel takes some heads of one token as the rows of a tile, and the pieces of paged.py. If ranks split the context, it
computes the part of a rank (mla_split.py). Pages of 8-bit entries have a kernel of their own (mla_codes.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import e, log2

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from stoker.kernels.attention import SpanGroup
from stoker.kernels.attention_rows import RowGroup, row_attention
from stoker.kernels.block_split import ALL_TOKENS, BlockSplit
from stoker.kernels.dispatch import is_power_of_2, next_power_of_2, overlaps, tl, triton, use_triton, wait_for_inputs
from stoker.kernels.head_matmul import head_matmul
from stoker.kernels.kv_pages import kernel_pages, page_options
from stoker.kernels.latent_pages import entries_read, entry_tokens
from stoker.kernels.mla_codes import attend_latent_codes
from stoker.kernels.paged import PagedSpans, max_parts, new_parts, tile_tokens
from stoker.kernels.paged_parts import join_tiles, merge
from stoker.kernels.pieces import FIELDS
from stoker.kernels.split_parts import join_split

LOG2_E = log2(e)
_EXPANDED_VALUES = 1 << 24  # of k and v that are held at a time
_TILE_HEADS = 64
_MIN_DOT = 16
_KEYS = 32  # at a time: 64 rows of a query, and two stages of keys, fill shared memory
_PROGRAMS = 512
_JOINED_ROWS = 32


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The sizes of MLA: the parts of a head of q and k, a head of v, and the latent that k and v are expanded from."""

    num_heads: int
    nope: int  # values of q and k without a rotary embedding
    rope: int  # values of q and k with it; those of k are shared by all heads
    value: int
    latent: int

    @property
    def width(self) -> int:
        """Values of a token in the KV cache."""
        return self.latent + self.rope

    def expands(self, num_tokens: int, num_keys: int) -> bool:
        """Return True if a span takes fewer multiplications in the expanded form."""
        both = (self.nope + self.value) * self.latent
        expanded = num_keys * both + num_tokens * num_keys * (self.nope + self.rope + self.value)
        absorbed = num_tokens * both + num_tokens * num_keys * (2 * self.latent + self.rope)
        return expanded < absorbed


def cut_heads(num_heads: int) -> tuple[int, int]:
    """Return the query heads and KV heads of grouped-query attention whose pieces suit the kernel (paged.Cutter): the
    tiles of a token take the place of KV heads."""
    num_tiles = num_heads // _tile_heads(num_heads)
    return _TILE_HEADS * num_tiles, num_tiles


def _tile_heads(num_heads: int) -> int:
    return next(heads for heads in range(min(num_heads, _TILE_HEADS), 0, -1) if num_heads % heads == 0)


def fits(x: Tensor, block_tokens: int, width: int) -> bool:
    """Return True if the kernel supports this device, dtype, block size and width of an entry: a power of two for the
    latent, and a smaller one for the rotated key."""
    latent = 1 << (width.bit_length() - 1)
    rope = width - latent
    is_width = _MIN_DOT <= rope < latent <= 512 and is_power_of_2(rope)
    return use_triton(x) and is_width and is_power_of_2(block_tokens) and block_tokens >= _MIN_DOT


def absorbed_ref(
    q: Tensor, pages: Tensor, group: SpanGroup | RowGroup, weight: Tensor, shape: LatentShape, scale: float, exact: bool
) -> Tensor:
    key_weight, value_weight = weight.split([shape.nope, shape.value], 1)
    query = torch.cat([head_matmul(q[..., : shape.nope], key_weight, exact), q[..., shape.nope :]], -1)
    found = _attend_ref(query, pages, group, shape, scale)
    return head_matmul(found.to(q.dtype), value_weight.transpose(1, 2), exact)


def _attend_ref(query: Tensor, pages: Tensor, group: SpanGroup | RowGroup, shape: LatentShape, scale: float) -> Tensor:
    """[tokens, heads, width] -> [tokens, heads, latent]"""
    width, latent = shape.width, shape.latent
    if isinstance(group, RowGroup):
        if group.gathered is None:
            keys = pages.view(-1, width)
        else:
            assert group.dtype is not None
            read = entries_read(pages, _key_pages(group.gathered), latent, shape.rope, group.dtype)
            keys = read.view(-1, width)
            query = query.to(group.dtype)
        return row_attention(query.contiguous(), keys, keys, group, scale)[..., :latent]
    keys = _gathered(pages, group, shape)
    query = query.to(group.dtype)
    if isinstance(group.tokens, slice):
        keys = keys.expand(shape.num_heads, -1, -1)
        options = (group.mask, 0.0, group.is_causal)
        return scaled_dot_product_attention(
            query.transpose(0, 1), keys, keys[..., :latent], *options, scale=scale
        ).transpose(0, 1)
    # One token per span: its heads take the place of a longer span's tokens.
    keys = keys[:, None]
    return scaled_dot_product_attention(query[:, None], keys, keys[..., :latent], group.mask, scale=scale)[:, 0]


def _key_pages(pages: Tensor) -> Tensor:
    """Return the pages of K, from those of K and V."""
    return pages[: len(pages) // 2]


def _gathered(pages: Tensor, group: SpanGroup, shape: LatentShape) -> Tensor:
    """[spans, keys, width]"""
    entries = entries_read(pages, _key_pages(group.pages), shape.latent, shape.rope, group.dtype)
    return entries.view(group.num_spans, -1, shape.width)[:, : group.num_keys]


def expanded(
    q: Tensor, entries: Tensor, weight: Tensor, shape: LatentShape, scale: float, mask: Tensor | None, is_causal: bool
) -> Tensor:
    """Attention of a span's tokens [tokens, heads, nope + rope] over its keys [keys, width], some heads at a time."""
    latents, turned = entries.split([shape.latent, shape.rope], 1)
    out = q.new_empty(*q.shape[:2], shape.value)
    for heads in _head_slices(len(entries), shape):
        key, value = torch.matmul(latents, weight[heads].transpose(1, 2)).split([shape.nope, shape.value], -1)
        key = torch.cat([key, turned.expand(len(key), -1, -1)], -1)
        if q.is_cuda:  # torch's fused attention wants heads of one size
            value = pad(value, (0, key.shape[-1] - shape.value))
        query = q[:, heads].transpose(0, 1)[None]
        found = scaled_dot_product_attention(
            query, key[None], value[None], mask, is_causal=is_causal, scale=scale
        )  # fmt: skip
        out[:, heads] = found[0, ..., : shape.value].transpose(0, 1)
    return out


def _head_slices(num_keys: int, shape: LatentShape) -> Iterator[slice]:
    each = expanded_heads(num_keys, shape)
    return (slice(first, first + each) for first in range(0, shape.num_heads, each))


def expanded_heads(num_keys: int, shape: LatentShape) -> int:
    """Return the number of heads whose k and v are held at a time."""
    per_head = num_keys * (2 * shape.nope + shape.rope + shape.value)
    return max(1, min(shape.num_heads, _EXPANDED_VALUES // per_head))


def mla_attention_ref(
    q: Tensor,
    pages: Tensor,
    groups: Sequence[SpanGroup | RowGroup],
    weight: Tensor,
    shape: LatentShape,
    scale: float,
    exact: bool = False,
) -> Tensor:
    out = q.new_empty(*q.shape[:2], shape.value)
    for group in groups:
        own_q = q[group.tokens]
        if (
            not exact
            and isinstance(group, SpanGroup)
            and isinstance(group.tokens, slice)
            and shape.expands(len(own_q), group.num_keys)
        ):
            entries = _gathered(pages, group, shape)[0]
            wide = (own_q.to(group.dtype), entries, weight.to(group.dtype), shape, scale, group.mask, group.is_causal)
            out[group.tokens] = expanded(*wide).to(q.dtype)
        else:
            out[group.tokens] = absorbed_ref(own_q, pages, group, weight, shape, scale, exact)
    return out


@triton.jit
def _attend_latent(
    q, turned_q, pages, table, token_rows, positions, pieces, parts, part_sums, finished, sums, scale, table_width,
    pages_per_block, turned_head, context,
    TILES: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, TOKENS: tl.constexpr, MERGES: tl.constexpr, FIELDS: tl.constexpr,
    CONTEXTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
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
    column, turned_column = tl.arange(0, LATENT), tl.arange(0, ROPE)
    head = (token * TILES + tile) * SHARED + row
    place = q + head[:, None] * LATENT + column[None, :]
    blocks = table + tl.load(token_rows + token).to(tl.int64) * table_width
    # The keys of a token do not depend on the other tokens of its piece.
    end = tl.minimum(end, (position + BLOCK * CONTEXTS) // (BLOCK * CONTEXTS))
    wait_for_inputs(OVERLAP)
    query = tl.load(place, mask=is_row, other=0.0)
    turned = tl.load(turned_q + head[:, None] * turned_head + turned_column[None, :], mask=is_row, other=0.0)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, LATENT], tl.float32)
    PER_BLOCK: tl.constexpr = BLOCK // KEYS
    for step in range(begin * PER_BLOCK, end * PER_BLOCK):
        block = tl.load(blocks + step // PER_BLOCK).to(tl.int64)
        inside = (step % PER_BLOCK) * KEYS + tl.arange(0, KEYS)
        entry = pages + block * pages_per_block * (BLOCK * (LATENT + ROPE)) + inside[:, None] * (LATENT + ROPE)
        at = step * KEYS + tl.arange(0, KEYS)
        if CONTEXTS > 1:  # BLOCK tokens of each block are on this rank
            at = (step // PER_BLOCK * CONTEXTS + context) * BLOCK + inside
        is_there = at <= position
        latents = tl.load(entry + column[None, :], mask=is_there[:, None], other=0.0).to(query.dtype)
        keys = tl.load(entry + LATENT + turned_column[None, :], mask=is_there[:, None], other=0.0).to(query.dtype)
        score = tl.dot(query, tl.trans(latents), input_precision="ieee")
        score = tl.dot(turned, tl.trans(keys), score, input_precision="ieee") * scale
        score = tl.where(is_there[None, :], score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, 1))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = tl.exp2(score - shift[:, None])
        fade = tl.exp2(largest - shift)
        total = total * fade + tl.sum(weight, 1)
        found = tl.dot(weight.to(latents.dtype), latents, found * fade[:, None], input_precision="ieee")
        largest = new_largest
    total = tl.where(total == 0.0, 1.0, total)  # a part may have no key that the token sees
    largest = tl.where(is_mine, largest, 0.0)
    found = found / total[:, None]
    if num_parts == 1:
        tl.store(place, found.to(q.dtype.element_ty), mask=is_row)
        if CONTEXTS > 1:
            tl.store(sums + head, largest + tl.log2(total), mask=is_mine)
    else:
        mine = ((number * TILES + tile) * TOKENS + place_in_piece) * ROWS + row
        tl.store(parts + mine[:, None] * LATENT + column[None, :], found, mask=is_row)
        tl.store(part_sums + mine, largest + tl.log2(total))
        if MERGES:
            tl.debug_barrier()  # all of this program's part is written before it counts as finished
            counter = finished + group * TILES + tile
            if tl.atomic_add(counter, 1, sem="acq_rel") == num_parts - 1:
                tl.store(counter, 0)
                found = merge(parts, part_sums, group, num_parts, tile, row, column, is_row, TILES, ROWS, LATENT)
                tl.store(place, found.to(q.dtype.element_ty), mask=is_row)


def latent_attention_triton(
    q: Tensor,
    turned_q: Tensor,
    pages: Tensor,
    spans: PagedSpans,
    scale: float,
    split: BlockSplit = ALL_TOKENS,
    sums: Tensor | None = None,
) -> Tensor:
    """q [tokens, heads, latent], turned_q [tokens, heads, rope], a view. The result overwrites q.

    With a `split`, the keys are those of this rank, and `sums` [tokens, heads] gets the logarithm to base 2 of each row's sum
    of weights. Rows whose keys were split into parts are merged by mla_split.py."""
    assert q.is_contiguous()
    num_heads, latent = q.shape[1:]
    rope, shared, overlap, exact = turned_q.shape[2], _tile_heads(num_heads), overlaps(q), spans.form.exact
    assert turned_q.stride()[::2] == (num_heads * turned_q.stride(1), 1)
    num_tiles, rows, block_tokens = (
        num_heads // shared,
        max(_MIN_DOT, next_power_of_2(shared)),
        entry_tokens(pages, latent, rope),
    )
    codes = page_options(pages)
    attend = attend_latent_codes if codes else _attend_latent
    where = (q, turned_q, kernel_pages(pages), spans.table, spans.token_rows, spans.positions)
    common = (
        *(spans.finished, q if sums is None else sums, scale * LOG2_E, spans.table.stride(0), spans.pages_per_block),
        *(turned_q.stride(1), split.index),
    )
    options = {
        "TILES": num_tiles, "SHARED": shared, "ROWS": rows, "LATENT": latent, "ROPE": rope, "BLOCK": block_tokens,
        "KEYS": min(_KEYS, block_tokens), "FIELDS": FIELDS, "CONTEXTS": split.of, "OVERLAP": overlap, "num_warps": 8,
        "num_stages": 2, "launch_pdl": overlap, **codes,
    }  # fmt: skip
    if len(spans.singles):
        programs = len(spans.singles) * num_tiles if exact else _PROGRAMS
        parts = new_parts(q, len(spans.singles), programs, num_tiles, rows)
        grid = (num_tiles, len(spans.singles), 1)
        attend[grid](*where, spans.singles, *parts, *common, TOKENS=1, MERGES=sums is None, **options)
        if sums is not None:
            join_split(q, sums, spans.positions, spans.singles, parts, shared, rows, 1, programs)
    if len(spans.tiles):
        tokens = tile_tokens(_TILE_HEADS, q.dtype)
        parts = new_parts(q, len(spans.tiles), _PROGRAMS, num_tiles, tokens * rows)
        grid = (num_tiles, len(spans.tiles), tokens)
        attend[grid](*where, spans.tiles, *parts, *common, TOKENS=tokens, MERGES=False, **options)
        if exact:  # then keys of tiles are not split
            return q
        if sums is not None:
            join_split(q, sums, spans.positions, spans.tiles, parts, shared, rows, tokens, _PROGRAMS)
        else:
            joined = min(tokens * rows, _JOINED_ROWS)
            grid = (max_parts(len(spans.tiles), _PROGRAMS, num_tiles), num_tiles, tokens * rows // joined)
            join_tiles[grid](
                q, spans.positions, spans.tiles, *parts, KV_HEADS=num_tiles, SHARED=shared, SHARED_PADDED=rows,
                TOKENS=tokens, DIM=latent, ROWS=joined, BLOCK=block_tokens, FIELDS=FIELDS, WINDOW=0, CHUNK=0,
                MIN_BLOCKS=1, OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
            )  # fmt: skip
    return q


def mla_attention_triton(
    q: Tensor, entries: Tensor, pages: Tensor, spans: PagedSpans, weight: Tensor, shape: LatentShape, scale: float
) -> Tensor:
    whole = [
        (
            slice(first, first + count),
            expanded(q[first : first + count], entries[first : first + count], weight, shape, scale, None, True),
        )
        for first, count in spans.whole
    ]
    if whole and len(whole[0][1]) == len(q):
        return whole[0][1]
    key_weight, value_weight = weight.split([shape.nope, shape.value], 1)
    exact = spans.form.exact
    absorbed = head_matmul(q[..., : shape.nope], key_weight, exact)
    found = latent_attention_triton(absorbed, q[..., shape.nope :], pages, spans, scale)
    out = head_matmul(found, value_weight.transpose(1, 2), exact)
    for mine, values in whole:
        out[mine] = values
    return out


def mla_attention(
    q: Tensor,
    entries: Tensor,
    pages: Tensor,
    spans: Sequence[SpanGroup | RowGroup] | PagedSpans,
    weight: Tensor,
    shape: LatentShape,
    scale: float,
    exact: bool = False,
) -> Tensor:
    """Compute attention. `entries` [tokens, width] are the tokens' own, which the pages hold too."""
    if isinstance(spans, PagedSpans):
        return mla_attention_triton(q, entries, pages, spans, weight, shape, scale)
    return mla_attention_ref(q, pages, spans, weight, shape, scale, exact)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Attention over the paged KV cache, in Triton.

q [tokens, heads, head_dim]   pages: see kv_pages.py   -> like q

The query heads of one KV head are the rows of a tile, so that K and V are read once for all of them. The work comes as
pieces (pieces.py, exact_pieces.py): spans that decode one token or verify a few, and tiles of longer spans, each with
some of their key blocks. The pieces of one group leave partial results. For the former, the last piece to finish merges
them; for tiles, a kernel that follows does. The result overwrites the query; padding stays unchanged. attention.py is
the reference. Pages of 8-bit values have kernels of their own (paged_codes.py), which take the same pieces.

Layers that see only a window or a chunk (reach.py) take the same pieces too, and share their own, fewer blocks among
them. A sink is a logit per query head that takes part in the softmax without a value: the first piece of a group starts
with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import e, isqrt, log2

import torch
from torch import Tensor

from stoker.kernels.dense import dense_attention
from stoker.kernels.dispatch import is_power_of_2, overlaps, tl, triton, use_triton, wait_for_inputs
from stoker.kernels.kv_pages import kernel_pages, page_options, page_tokens
from stoker.kernels.paged_codes import attend_single_codes, attend_tile_codes
from stoker.kernels.paged_parts import join_tiles, merge, single_blocks, span_rows, start_sums, tile_blocks
from stoker.kernels.pieces import FIELDS, Ints, cut_keys, cut_tokens
from stoker.kernels.reach import FULL, Reach, first_seen

_LOG2_E = log2(e)
# The number of programs that keep a large GPU busy: small ones for single tokens, which are memory-bound, and large
# ones for tiles, which are compute-bound. Then the fewest key blocks that are worth a program of their own.
_SINGLE_PROGRAMS, _TILE_PROGRAMS = 512, 264
_SINGLE_BLOCKS, _TILE_BLOCKS = 2, 4
_MAX_SPLITS = 32
MAX_KV_HEADS = _SINGLE_PROGRAMS  # beyond it, there are more groups of pieces and KV heads than counters
MAX_SHARED_VALUES = 1 << 15  # query heads that share a KV head, times the head size: they fill shared memory
_MAX_BLOCK_VALUES = 1 << 14  # of a page; three pages of K and V fill shared memory
_MIN_DOT = 16  # the smallest tile of the tensor cores
_TILE_ROWS, _WIDE_TILE_ROWS = 128, 32  # tokens times query heads; the second is for float32
_JOINED_ROWS = 32
_SINGLE_WARPS, _SINGLE_STAGES, _TILE_WARPS, _TILE_STAGES = 2, 3, 8, 3
_TILE_REGISTERS = 128  # a few registers are spilled, but two programs fit instead of one: 466 TFLOP/s instead of 371


@dataclass(frozen=True, slots=True)
class SpanForm:
    """How the kernels compute spans; compiled into them."""

    span_tokens: int = 1  # the tokens of a piece in `PagedSpans.singles`; each has its query heads in the tile
    # Pieces may have no key that a token sees: the host may know only an upper bound of a row's position.
    guarded: bool = False
    exact: bool = False  # a token's result depends only on its own keys


@dataclass(frozen=True, slots=True)
class PagedSpans:
    """Which tokens attend to which, on the device."""

    table: Tensor  # [rows, blocks]: the blocks of each row
    token_rows: Tensor  # [tokens]: the table row of each token
    positions: Tensor  # [tokens], -1 is padding
    singles: Tensor  # [pieces, FIELDS] of the spans that decode a token, or verify a few
    tiles: Tensor  # [pieces, FIELDS] of the longer spans
    whole: tuple[tuple[int, int], ...]  # first token and count of the spans that dense.py computes
    finished: Tensor  # from `new_counters`: zeros before and after a call; calls that share it run one after the other
    pages_per_block: int
    num_kv_heads: int
    form: SpanForm = SpanForm()
    reach: Reach = FULL


@dataclass(frozen=True, slots=True)
class Cutter:
    """Cuts the attention of a step's spans into pieces that suit the kernels on this GPU. exact_pieces.py has the one for
    numerics=exact.

    The layers of all KV groups use the same pieces: those for the smallest tiles and the fewest splits.
    """

    num_kv_heads: int
    tile_tokens: int
    block_tokens: int
    form: SpanForm = SpanForm()

    @classmethod
    def of(
        cls, heads: Sequence[tuple[int, int]], block_tokens: int, dtype: torch.dtype, verifies: bool = False
    ) -> Cutter:
        """`heads` has the query heads and the KV heads of each group. `verifies`: steps may verify drafts."""
        shared = most_shared(heads)
        form = SpanForm(free_tokens(shared), guarded=True) if verifies else SpanForm()
        return cls(max(kv_heads for _, kv_heads in heads), tile_tokens(shared, dtype), block_tokens, form)

    def num_singles(self, count: Ints) -> int:
        """Return the number of pieces of decoding spans with these token counts, before their keys are split."""
        return int((-(-count // self.form.span_tokens)).sum())

    def needed_singles(self, count: Ints, start: Ints) -> int:
        """Return the fewest pieces that decoding spans can be cut into. Splitting keys needs room for one piece more
        than there are spans."""
        return self.num_singles(count) + 1 if len(count) else 0

    def max_singles(self, count: int, tokens: int = 1) -> int:
        """Upper bound of the number of pieces for this many spans that decode or verify `tokens` tokens each."""
        count *= -(-tokens // self.form.span_tokens)
        return count + min(self._wanted(_SINGLE_PROGRAMS), (_MAX_SPLITS - 1) * count)

    def room(self, needed: int) -> int:
        """Return the room for a step that is not captured and needs this many pieces of decoding spans."""
        return self.max_singles(needed - 1) if needed else 0

    def max_tiles(self, count: int) -> int:
        """Upper bound of the number of pieces for this many tiles."""
        return count + self._wanted(_TILE_PROGRAMS)

    def num_tiles(self, count: Ints) -> int:
        """Return the number of tiles of spans with these token counts."""
        return int((-(-count // self.tile_tokens)).sum())

    def singles(self, first: Ints, count: Ints, start: Ints, room: int) -> Ints:
        """Cut decoding spans into at most `room` pieces. `room` is at least `needed_singles`.

        Partial results are merged one after the other. So a span is not cut into more parts than each part has blocks.
        """
        if len(count) and int(count.max()) > self.form.span_tokens:
            first, count, start = cut_tokens(first, count, start, self.form.span_tokens)
        wanted = min(self._wanted(_SINGLE_PROGRAMS), room - len(first))
        min_blocks = isqrt(int(start.max()) // self.block_tokens + 1)
        return cut_keys(first, count, start, self.block_tokens, wanted, max(_SINGLE_BLOCKS, min_blocks))

    def tiles(self, first: Ints, count: Ints, start: Ints, room: int) -> Ints:
        """Cut longer spans into tiles, and these into at most `room` pieces."""
        first, count, start = cut_tokens(first, count, start, self.tile_tokens)
        wanted = min(self._wanted(_TILE_PROGRAMS), room - len(first))
        return cut_keys(first, count, start, self.block_tokens, wanted, _TILE_BLOCKS)

    def _wanted(self, programs: int) -> int:
        return max(1, programs // self.num_kv_heads)


def most_shared(heads: Sequence[tuple[int, int]]) -> int:
    """Return the most query heads that share a KV head. `heads` has the query heads and the KV heads of each group."""
    return max(num_heads // num_kv_heads for num_heads, num_kv_heads in heads)


def fits(x: Tensor, block_tokens: int, head_dim: int) -> bool:
    """Return True if the kernels support this device, dtype, block size and head size."""
    is_tile = is_power_of_2(block_tokens) and is_power_of_2(head_dim) and block_tokens * head_dim <= _MAX_BLOCK_VALUES
    return use_triton(x) and is_tile and _MIN_DOT <= block_tokens <= 128 and _MIN_DOT <= head_dim <= 256


def new_counters(device: torch.device, count: int = 2 * _SINGLE_PROGRAMS) -> Tensor:
    """Return one counter per group of pieces and KV head; see `cut_keys` for the number of parts."""
    return torch.zeros(count, dtype=torch.int32, device=device)


@triton.jit
def _attend_single(
    q, pages, table, token_rows, positions, sinks, pieces, parts, part_sums, finished, scale, table_width,
    pages_per_block,
    KV_HEADS: tl.constexpr, SHARED: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, FIELDS: tl.constexpr, GUARDED: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    FIXED: tl.constexpr, MIN_BLOCKS: tl.constexpr, SINKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    head, number = tl.program_id(0), tl.program_id(1)  # padding comes last
    # The tables are inputs of the step. They were written before its first kernel.
    piece = pieces + number * FIELDS
    token, count = tl.load(piece).to(tl.int64), tl.load(piece + 1)
    begin, end = tl.load(piece + 2).to(tl.int32), tl.load(piece + 3).to(tl.int32)
    group, num_parts = tl.load(piece + 4).to(tl.int32), tl.load(piece + 5).to(tl.int32)
    if count == 0:
        if number == 0:  # one program must do this, because the next kernel waits only for this one
            wait_for_inputs(OVERLAP)
        return
    row, position, last, is_row, first_value = span_rows(
        positions, token, count, head, KV_HEADS, SHARED, TOKENS, ROWS, DIM, GUARDED
    )
    column = tl.arange(0, DIM)
    key = tl.arange(0, BLOCK)
    is_head = is_row[:, None]
    place = first_value[:, None] + column[None, :]
    blocks = table + tl.load(token_rows + token).to(tl.int64) * table_width
    first, begin, end, num_parts = single_blocks(
        position, last, begin, end, number - group, num_parts, BLOCK, GUARDED, WINDOW, CHUNK, FIXED, MIN_BLOCKS
    )
    if number - group >= num_parts:
        return
    wait_for_inputs(OVERLAP)
    query = tl.load(q + place, mask=is_head, other=0.0)
    inside_page = key[:, None] * DIM + column[None, :]
    shared = row % (ROWS // TOKENS)
    largest, total = start_sums(sinks, head * SHARED + shared, shared < SHARED, number == group, ROWS, SINKS)
    found = tl.zeros([ROWS, DIM], tl.float32)
    for number_of_block in range(begin, end):
        block = tl.load(blocks + number_of_block).to(tl.int64)
        page = pages + (block * pages_per_block + head) * (BLOCK * DIM)
        at = number_of_block * BLOCK + key
        is_there = at <= last
        is_seen = at[None, :] <= position[:, None]
        if WINDOW + CHUNK > 0:
            is_there = is_there & (at >= first)
            is_seen = is_seen & (at[None, :] >= first_seen(position, WINDOW, CHUNK)[:, None])
        keys = tl.load(page + inside_page, mask=is_there[:, None], other=0.0).to(query.dtype)
        values = tl.load(page + KV_HEADS * BLOCK * DIM + inside_page, mask=is_there[:, None], other=0.0).to(query.dtype)
        score = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        score = tl.where(is_seen, score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, 1))
        shift = new_largest
        if GUARDED:
            shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = tl.exp2(score - shift[:, None])
        fade = tl.exp2(largest - shift)
        total = total * fade + tl.sum(weight, 1)
        found = found * fade[:, None] + tl.dot(weight.to(values.dtype), values, input_precision="ieee")
        largest = new_largest
    if GUARDED:
        total = tl.where(total == 0.0, 1.0, total)
        largest = tl.where(is_row, largest, 0.0)
    found = found / total[:, None]
    if num_parts == 1:
        tl.store(q + place, found.to(q.dtype.element_ty), mask=is_head)
    else:
        mine = (number * KV_HEADS + head) * ROWS + row
        tl.store(parts + mine[:, None] * DIM + column[None, :], found, mask=is_head)
        tl.store(part_sums + mine, largest + tl.log2(total))
        tl.debug_barrier()  # all of this program's part is written before it counts as finished
        counter = finished + group * KV_HEADS + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_parts - 1:
            tl.store(counter, 0)
            found = merge(parts, part_sums, group, num_parts, head, row, column, is_head, KV_HEADS, ROWS, DIM)
            tl.store(q + place, found.to(q.dtype.element_ty), mask=is_head)


@triton.jit
def _attend_tile(
    q, pages, table, token_rows, positions, sinks, pieces, parts, part_sums, scale, table_width, pages_per_block,
    KV_HEADS: tl.constexpr, SHARED: tl.constexpr, SHARED_PADDED: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, FIELDS: tl.constexpr, EXACT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    MIN_BLOCKS: tl.constexpr, SINKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
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
    column = tl.arange(0, DIM)
    token, shared = row // SHARED_PADDED, row % SHARED_PADDED
    position = start + token
    is_mine = ((token < count) & (shared < SHARED))[:, None]
    place = (((first + token) * KV_HEADS + head) * SHARED + shared)[:, None] * DIM + column[None, :]
    blocks = table + tl.load(token_rows + first).to(tl.int64) * table_width
    wait_for_inputs(OVERLAP)
    query = tl.load(q + place, mask=is_mine, other=0.0)
    inside_page = tl.arange(0, BLOCK)[:, None] * DIM + column[None, :]
    largest, total = start_sums(
        sinks, head * SHARED + shared, shared < SHARED, number == group, TOKENS * SHARED_PADDED, SINKS
    )
    found = tl.zeros([TOKENS * SHARED_PADDED, DIM], tl.float32)
    # The blocks that all tokens see whole come first, then those that only some see: the last ones, and with a local
    # reach the first ones.
    whole_begin = tl.minimum(tl.maximum(first_of_all, begin), end)
    whole_end = tl.minimum(tl.maximum((start + 1) // BLOCK, whole_begin), end)
    if EXACT:  # the two loops round differently, and which keys all tokens of a tile see depends on the tile
        whole_begin, whole_end = begin, begin
    else:
        for number_of_block in range(whole_begin, whole_end):
            block = tl.load(blocks + number_of_block).to(tl.int64)
            page = pages + (block * pages_per_block + head) * (BLOCK * DIM) + inside_page
            keys = tl.load(page).to(query.dtype)
            values = tl.load(page + KV_HEADS * BLOCK * DIM).to(query.dtype)
            score = tl.dot(query, tl.trans(keys), input_precision="ieee")
            new_largest = tl.maximum(largest, tl.max(score, 1) * scale)
            weight = tl.exp2(score * scale - new_largest[:, None])
            fade = tl.exp2(largest - new_largest)
            total = total * fade + tl.sum(weight, 1)
            found = found * fade[:, None]
            found = tl.dot(weight.to(values.dtype), values, found, input_precision="ieee")
            largest = new_largest
    for step in range(begin, end - (whole_end - whole_begin)):
        number_of_block = step + tl.where(step < whole_begin, 0, whole_end - whole_begin)
        at = number_of_block * BLOCK + tl.arange(0, BLOCK)
        is_there = at < start + count
        is_seen = at[None, :] <= position[:, None]
        if WINDOW + CHUNK > 0:
            is_there = is_there & (at >= first_key)
            is_seen = is_seen & (at[None, :] >= first_seen(position, WINDOW, CHUNK)[:, None])
        block = tl.load(blocks + number_of_block).to(tl.int64)
        page = pages + (block * pages_per_block + head) * (BLOCK * DIM) + inside_page
        keys = tl.load(page, mask=is_there[:, None], other=0.0).to(query.dtype)
        values = tl.load(page + KV_HEADS * BLOCK * DIM, mask=is_there[:, None], other=0.0).to(query.dtype)
        score = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        score = tl.where(is_seen, score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, 1))
        # A part may have no key that its first tokens see.
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = tl.exp2(score - shift[:, None])
        fade = tl.exp2(largest - shift)
        total = total * fade + tl.sum(weight, 1)
        found = found * fade[:, None]
        found = tl.dot(weight.to(values.dtype), values, found, input_precision="ieee")
        largest = new_largest
    found = found / tl.where(total == 0.0, 1.0, total)[:, None]
    if num_parts == 1:
        tl.store(q + place, found.to(q.dtype.element_ty), mask=is_mine)
    else:
        mine = (number * KV_HEADS + head) * (TOKENS * SHARED_PADDED) + row
        tl.store(parts + mine[:, None] * DIM + column[None, :], found, mask=is_mine)
        tl.store(part_sums + mine, largest + tl.log2(total))


def paged_attention_triton(
    q: Tensor, key: Tensor, value: Tensor, pages: Tensor, spans: PagedSpans, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Compute attention; the result overwrites q. sinks [heads]: one more logit of each head's softmax."""
    assert q.is_contiguous()
    num_heads, head_dim = q.shape[1:]
    kv_heads, block_tokens = spans.num_kv_heads, page_tokens(pages, head_dim)
    options = page_options(pages)
    single, tile = (attend_single_codes, attend_tile_codes) if options else (_attend_single, _attend_tile)
    shared = num_heads // kv_heads
    common = (scale * _LOG2_E, spans.table.stride(0), spans.pages_per_block)
    where = (q, kernel_pages(pages), spans.table, spans.token_rows, spans.positions, q if sinks is None else sinks)
    overlap, form, reach = overlaps(q), spans.form, spans.reach
    options |= {"WINDOW": reach.window, "CHUNK": reach.chunk, "SINKS": sinks is not None, "OVERLAP": overlap}
    if len(spans.singles):
        rows = span_tile_rows(form, shared)
        programs = len(spans.singles) * kv_heads if form.exact else _SINGLE_PROGRAMS
        parts, part_sums = new_parts(q, len(spans.singles), programs, kv_heads, rows)
        single[(kv_heads, len(spans.singles))](
            *where, spans.singles, parts, part_sums, spans.finished, *common,
            KV_HEADS=kv_heads, SHARED=shared, TOKENS=form.span_tokens, ROWS=rows, DIM=head_dim, BLOCK=block_tokens,
            FIELDS=FIELDS, GUARDED=form.guarded or reach.is_local, FIXED=form.exact, MIN_BLOCKS=_SINGLE_BLOCKS,
            num_warps=_SINGLE_WARPS, num_stages=_SINGLE_STAGES, launch_pdl=overlap, **options,
        )  # fmt: skip
    if len(spans.tiles):
        tokens, padded = tile_tokens(shared, q.dtype), _padded(shared)
        parts, part_sums = new_parts(q, len(spans.tiles), _TILE_PROGRAMS, kv_heads, tokens * padded)
        is_wide = q.dtype == torch.float32
        tile[(kv_heads, len(spans.tiles))](
            *where, spans.tiles, parts, part_sums, *common,
            KV_HEADS=kv_heads, SHARED=shared, SHARED_PADDED=padded, TOKENS=tokens, DIM=head_dim,
            BLOCK=block_tokens, FIELDS=FIELDS, EXACT=form.exact, MIN_BLOCKS=_TILE_BLOCKS,
            num_warps=4 if is_wide else _TILE_WARPS, num_stages=1 if is_wide else _TILE_STAGES if overlap else 2,
            maxnreg=_TILE_REGISTERS if overlap and not is_wide and head_dim <= 128 else None, launch_pdl=overlap,
            **options,
        )  # fmt: skip
        if not form.exact:  # then keys of tiles are not split
            joined = min(tokens * padded, _JOINED_ROWS)
            join_tiles[(max_parts(len(spans.tiles), _TILE_PROGRAMS, kv_heads), kv_heads, tokens * padded // joined)](
                q, spans.positions, spans.tiles, parts, part_sums,
                KV_HEADS=kv_heads, SHARED=shared, SHARED_PADDED=padded, TOKENS=tokens, DIM=head_dim, ROWS=joined,
                BLOCK=block_tokens, FIELDS=FIELDS, WINDOW=reach.window, CHUNK=reach.chunk, MIN_BLOCKS=_TILE_BLOCKS,
                OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
            )  # fmt: skip
    for first, count in spans.whole:
        assert sinks is None, "dense.py has no sinks"
        assert not reach.first_key(count - 1), "dense.py has no windows and no chunks"
        mine = slice(first, first + count)
        found = dense_attention(q[mine], key[mine], value[mine], scale)
        if count == len(q):
            return found
        q[mine] = found
    return q


def new_parts(q: Tensor, num_pieces: int, programs: int, kv_heads: int, rows: int) -> tuple[Tensor, Tensor]:
    count = max_parts(num_pieces, programs, kv_heads) * kv_heads * rows
    return q.new_empty(count, q.shape[2], dtype=torch.float32), q.new_empty(count, dtype=torch.float32)


def max_parts(num_pieces: int, programs: int, kv_heads: int) -> int:
    """Upper bound of the number of parts among this many pieces: see `cut_keys`."""
    return min(num_pieces, 2 * max(1, programs // kv_heads))


def tile_tokens(shared: int, dtype: torch.dtype) -> int:
    """Return the tokens of a tile, if `shared` query heads share a KV head."""
    return max(1, (_WIDE_TILE_ROWS if dtype == torch.float32 else _TILE_ROWS) // _padded(shared))


def span_tile_rows(form: SpanForm, shared: int) -> int:
    """Return the rows of the tile that computes a piece of `PagedSpans.singles`."""
    return max(_MIN_DOT, form.span_tokens * _padded(shared))


def free_tokens(shared: int) -> int:
    """Return how many tokens of a span have their query heads in the smallest tile of the tensor cores."""
    return max(1, _MIN_DOT // _padded(shared))


def _padded(count: int) -> int:
    return 1 << (count - 1).bit_length()

"""Attention on a CPU in float32, whose bits do not depend on the batch, on chunks of a prompt or on the number of threads.

q [tokens, heads, head_dim]   cos, sin [tokens, 1, head_dim]   pages: see kv_pages.py   -> like q

- Scores. Queries and keys are rounded to a grid: multiples of a power of two, chosen by the length of the vector. Float32
  represents all sums of their products, so every matmul gives the same scores, whatever its order of additions is.
- Softmax. The number of keys is padded to a multiple of the largest vector size. So a key's place in the order of
  additions does not depend on the padding, and hidden keys add zero.
- Values. `embedding_bag` adds up the weighted values of one row in the order of the keys.

A row is one query head of one token. Single tokens read their keys in place; the pages of longer spans, and pages of
another dtype, are gathered first. Where layers see only a window or a chunk (reach.py), the keys before it are hidden
and keep their places: a key's place in the order of additions must not depend on the span.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.kernels.attention import SpanShape
from stoker.kernels.kv_pages import kv_read, kv_write, page_tokens
from stoker.kernels.norm import rms_norm
from stoker.kernels.reach import FULL, Reach
from stoker.kernels.rope_write import HeadNorms

_KEY_STEP = 16  # the largest number of float32 values in a vector register
# A vector shorter than 2 * 2^e is rounded to multiples of 2^(e - bits). Its length is then below 2^(bits + 1) units, plus
# rounding, and a sum of products below 2^24 units (Cauchy and Schwarz): 12 bits of the key and 11 of the query.
_QUERY_BITS, _KEY_BITS = 10, 11
_ROUNDING = 1.5 * 2**23  # adding and subtracting this many units rounds to a multiple of the unit
_EXPONENT = torch.tensor(
    0x7F800000, dtype=torch.int32
)  # the bits of a float32's exponent; cpu_int8.py says why a tensor
# Spans of one token are batched while the shortest has at least this share of the longest one's keys.
_MIN_FILL = 0.6
_MAX_ROW_KEYS = 1 << 18  # scores of a KV head that are computed at a time
_FEW_ROW_KEYS = 1 << 14  # up to this many, all KV heads are computed at a time


@dataclass(frozen=True, slots=True)
class SingleTokens:
    """Spans of one token, all padded to the same number of keys."""

    tokens: Tensor | None  # which tokens of the batch; None: all, in their order
    pattern: (
        Tensor  # sparse [rows, slots]: the slot of each key, counted from the first K of the layer or of `gathered`
    )
    scores: Tensor  # [spans, heads, keys]: the values of `pattern`, which every layer overwrites
    slots: Tensor  # [rows * keys]: the columns of `pattern`
    starts: Tensor  # [rows + 1]: where each row starts in `slots`
    mask: Tensor  # [spans, 1, keys], added to the scores
    gathered: (
        Tensor | None
    )  # [2 * spans * kv_heads * blocks]: pages of K, then of V; None: float32 pages, read in place


@dataclass(frozen=True, slots=True)
class SpanChunk:
    """Some consecutive tokens of a span."""

    first: int  # in the batch
    count: int
    kv_heads: int  # how many KV heads are computed at a time
    slots: Tensor  # [rows of these heads * keys]: the gathered keys of each row
    starts: Tensor  # [rows of these heads + 1]
    mask: Tensor  # [tokens, keys], added to the scores


@dataclass(frozen=True, slots=True)
class LongerSpan:
    """A span of several tokens. Its pages are gathered."""

    pages: Tensor  # [2 * kv_heads * blocks]: the pages of K, then those of V
    chunks: list[SpanChunk]


@dataclass(frozen=True, slots=True)
class GridSpans:
    """The spans of a step. It is built once for all layers."""

    singles: list[SingleTokens]
    longer: list[LongerSpan]
    kv_slots: Tensor  # [tokens * 2 * kv_heads]: where each token's K and V go in float32 pages
    shifts: Tensor  # [heads + kv_heads, 1]: see `round_to_grid`


@dataclass(frozen=True, slots=True)
class LayerSlots:
    """The pages of a layer, and views of them that are the same in every step."""

    pages: Tensor
    slots: Tensor | None  # [slots, head_dim], counted from the first K; None: the pages are not in float32
    keys: Tensor | None  # [head_dim, slots]: as many as the last layer has
    values: Tensor | None  # [slots, head_dim], counted from the first V

    @classmethod
    def of(cls, pages: Tensor, num_kv_heads: int, head_dim: int, num_pages: int) -> LayerSlots:
        """`num_pages` is the number of pages after the first one of the last layer."""
        if pages.dtype != torch.float32:
            return cls(pages, None, None, None)
        slots = pages.view(-1, head_dim)
        keys = pages[:num_pages].view(-1, head_dim).t()
        return cls(pages, slots, keys, pages[num_kv_heads:].view(-1, head_dim))


@dataclass(frozen=True, slots=True)
class _Sizes:
    num_heads: int
    num_kv_heads: int
    block_tokens: int
    num_slots: int  # of a layer
    reach: Reach

    @property
    def shared(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


def grid_spans(
    spans: Sequence[SpanShape],
    slots: NDArray[np.int64],
    num_heads: int,
    num_kv_heads: int,
    pages: Tensor,
    head_dim: int,
    reach: Reach = FULL,
) -> GridSpans:
    """Group the spans of a step. slots [tokens, kv_heads]: where each token's K goes. `pages` are those of the last layer,
    which has the fewest slots after its first page. The layers see `reach`."""
    block_tokens = page_tokens(pages, head_dim)
    sizes = _Sizes(num_heads, num_kv_heads, block_tokens, len(pages) * block_tokens, reach)
    in_place = pages.dtype == torch.float32
    singles = []
    for group in _similar([span for span in spans if span.count == 1]):
        tokens = None if len(group) == len(spans) else torch.tensor([span.first for span in group])
        singles.append(_single_tokens(group, tokens, sizes, in_place))
    longer = [_longer_span(span, sizes) for span in spans if span.count > 1]
    kv_slots = np.concatenate([slots, slots + num_kv_heads * block_tokens], 1).ravel()
    shifts = [_shift(_QUERY_BITS)] * num_heads + [_shift(_KEY_BITS)] * num_kv_heads
    return GridSpans(singles, longer, torch.from_numpy(kv_slots), torch.tensor(shifts)[:, None])


def _similar(spans: list[SpanShape]) -> Iterator[list[SpanShape]]:
    """Yield groups of spans with a similar number of blocks. Spans that are all similar keep their order."""
    lengths = [len(span.pages) for span in spans]
    if spans and min(lengths) < _MIN_FILL * max(lengths):
        spans = sorted(spans, key=lambda span: len(span.pages))
    while spans:
        longest = max(len(span.pages) for span in spans)
        taken = [span for span in spans if len(span.pages) >= _MIN_FILL * longest]
        spans = spans[: len(spans) - len(taken)]
        yield taken


def _single_tokens(spans: list[SpanShape], tokens: Tensor | None, sizes: _Sizes, in_place: bool) -> SingleTokens:
    num_keys = _padded(max(span.start for span in spans) + 1)
    num_blocks = -(-num_keys // sizes.block_tokens)
    table = np.stack([_page_table(span, num_blocks, sizes) for span in spans])
    pages = table[:, None] + np.arange(sizes.num_kv_heads)[:, None]  # [spans, kv_heads, blocks]
    gathered = None
    if not in_place:
        gathered = torch.from_numpy(np.concatenate([pages.ravel(), pages.ravel() + sizes.num_kv_heads]))
        pages = np.arange(pages.size).reshape(pages.shape)
    slots = (pages[..., None] * sizes.block_tokens + np.arange(sizes.block_tokens)).reshape(*pages.shape[:2], -1)
    slots = slots[..., :num_keys].repeat(sizes.shared, 1).ravel()
    index, starts = torch.from_numpy(slots), torch.arange(0, len(slots) + 1, num_keys)
    num_slots = sizes.num_slots if in_place else pages.size * sizes.block_tokens
    size = (len(starts) - 1, num_slots)
    pattern = torch.sparse_csr_tensor(starts, index, torch.zeros(len(slots)), size, check_invariants=False)
    positions = np.array([span.start for span in spans])[:, None]
    hidden = (np.arange(num_keys) > positions) | (np.arange(num_keys) < sizes.reach.first_keys(positions))
    mask = torch.from_numpy(np.where(hidden, np.float32("-inf"), np.float32(0)))[:, None]
    scores = pattern.values().view(len(spans), sizes.num_heads, num_keys)
    return SingleTokens(tokens, pattern, scores, index, starts, mask, gathered)


def _longer_span(span: SpanShape, sizes: _Sizes) -> LongerSpan:
    num_keys = _padded(span.start + span.count)
    table = _page_table(span, -(-num_keys // sizes.block_tokens), sizes)
    keys = (table + np.arange(sizes.num_kv_heads)[:, None]).ravel()
    count = max(1, _MAX_ROW_KEYS // (sizes.shared * num_keys))
    chunks = []
    for first in range(0, span.count, count):
        start, size = span.start + first, min(count, span.count - first)
        visible = _padded(start + size)
        rows = sizes.shared * size
        kv_heads = sizes.num_kv_heads if rows * visible <= _FEW_ROW_KEYS else 1
        head = torch.arange(kv_heads, dtype=torch.int32)[:, None, None] * (len(table) * sizes.block_tokens)
        slots = (head + torch.arange(visible, dtype=torch.int32)).expand(-1, rows, -1).flatten()
        starts = torch.arange(0, len(slots) + 1, visible, dtype=torch.int32)
        mask = torch.full((size, visible), float("-inf")).triu_(start + 1)
        if sizes.reach.is_local:
            begins = sizes.reach.first_keys(torch.arange(start, start + size))
            mask.masked_fill_(torch.arange(visible) < begins[:, None], float("-inf"))
        chunks.append(SpanChunk(span.first + first, size, kv_heads, slots, starts, mask))
    return LongerSpan(torch.from_numpy(np.concatenate([keys, keys + sizes.num_kv_heads])), chunks)


def _page_table(span: SpanShape, num_blocks: int, sizes: _Sizes) -> NDArray[np.int64]:
    """Return the span's pages, with its last in place of those that it does not have or see: hidden keys must be finite,
    and those of others may not be."""
    unseen, own = sizes.reach.first_key(span.start) // sizes.block_tokens, span.pages[-1:]
    return np.array(own * unseen + span.pages[unseen:num_blocks] + own * (num_blocks - len(span.pages)))


def _padded(num_keys: int) -> int:
    return -(-num_keys // _KEY_STEP) * _KEY_STEP


def round_to_grid(x: Tensor, shift: Tensor | float) -> Tensor:
    """Round vectors [..., head_dim] in place, to a unit that depends on their length. `shift` comes from `_shift`."""
    length = torch.linalg.vector_norm(x, 2.0, -1, True)
    power = length.view(torch.int32).bitwise_and_(_EXPONENT).view(torch.float32)
    added = power.mul_(shift)
    return x.add_(added).sub_(added)


def _shift(bits: int) -> float:
    """Return the number whose addition and subtraction rounds a vector of the length 1 to the grid."""
    return _ROUNDING * 2.0**-bits


def grid_rope_write(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    layer: LayerSlots,
    slots: Tensor,
    spans: GridSpans,
    num_kv_heads: int,
    norms: HeadNorms | None,
) -> Tensor:
    """Do what `rope_write` does (rope_write.py), with q and k on the grid. Return q. The memory of `heads` is reused."""
    head_dim = heads.shape[2]
    num_heads = heads.shape[1] - 2 * num_kv_heads
    turned = heads[:, : num_heads + num_kv_heads]
    if norms is not None:
        query, key = turned.split([num_heads, num_kv_heads], 1)
        query.copy_(rms_norm(query, norms.query, norms.eps))
        key.copy_(rms_norm(key, norms.key, norms.eps))
    rotated = turned.roll(head_dim // 2, -1)
    round_to_grid(turned.mul_(cos).addcmul_(rotated, sin), spans.shifts)
    if layer.slots is not None:
        layer.slots.index_copy_(0, spans.kv_slots, heads[:, num_heads:].reshape(-1, head_dim))
    else:
        key, value = heads[:, num_heads:].split([num_kv_heads, num_kv_heads], 1)
        kv_write(key, layer.pages, slots)
        kv_write(value, layer.pages[num_kv_heads:], slots)
    return heads[:, :num_heads]


def grid_attention(q: Tensor, layer: LayerSlots, spans: GridSpans, num_kv_heads: int, scale: float) -> Tensor:
    """Compute attention for queries on the grid. Keys in float32 pages are on the grid too."""
    singles = spans.singles
    if len(singles) == 1 and singles[0].tokens is None:
        return _attend_single(q, layer, singles[0], scale)
    out = torch.empty(q.shape)
    for group in singles:
        out[group.tokens] = _attend_single(q[group.tokens], layer, group, scale)
    for span in spans.longer:
        _attend_longer(q, out, layer.pages, span, num_kv_heads, scale)
    return out


def _attend_single(q: Tensor, layer: LayerSlots, group: SingleTokens, scale: float) -> Tensor:
    head_dim, pattern = q.shape[2], group.pattern
    if layer.keys is not None and layer.values is not None:
        keys, values = layer.keys, layer.values
    else:
        assert group.gathered is not None
        gathered = kv_read(layer.pages, group.gathered, head_dim, torch.float32).view(2, -1, head_dim)
        keys, values = round_to_grid(gathered[0], _shift(_KEY_BITS)).t(), gathered[1]
    torch.sparse.sampled_addmm(pattern, q.reshape(-1, head_dim), keys, beta=0.0, out=pattern)
    scores = torch.add(group.mask, group.scores, alpha=scale)
    return _weighted(scores, values, group.slots, group.starts).view(q.shape)


def _attend_longer(q: Tensor, out: Tensor, pages: Tensor, span: LongerSpan, num_kv_heads: int, scale: float) -> None:
    num_heads, head_dim = q.shape[1:]
    keys, values = kv_read(pages, span.pages, head_dim, torch.float32).view(2, num_kv_heads, -1, head_dim)
    if pages.dtype != torch.float32:
        round_to_grid(keys, _shift(_KEY_BITS))
    for chunk in span.chunks:
        tokens, num_keys = slice(chunk.first, chunk.first + chunk.count), chunk.mask.shape[1]
        rows = q[tokens].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
        raw = torch.bmm(rows, keys[:, :num_keys].transpose(1, 2)).view(num_heads, chunk.count, num_keys)
        scores = torch.add(chunk.mask, raw, alpha=scale).view(num_kv_heads, -1, num_keys)
        parts = [
            _weighted(scores[i : i + chunk.kv_heads], values[i:].flatten(0, 1), chunk.slots, chunk.starts)
            for i in range(0, num_kv_heads, chunk.kv_heads)
        ]
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        out[tokens] = attended.view(num_heads, chunk.count, head_dim).transpose(0, 1)


def _weighted(scores: Tensor, values: Tensor, slots: Tensor, starts: Tensor) -> Tensor:
    """Return the sum of each row's values, weighted by the softmax of its scores."""
    weights = scores.softmax(-1).view(-1)
    # The arguments after `starts`: scale_grad_by_freq, mode (0: sum), sparse, weights, include_last_offset.
    return torch._embedding_bag_forward_only(values, slots, starts, False, 0, False, weights, True)[0]

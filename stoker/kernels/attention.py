"""Attention over the paged KV cache.

q [tokens, heads, head_dim]   pages: see kv_pages.py   -> like q

A page is one head's K or V of one block of one layer. The reference gathers each span's pages into a contiguous run and
calls torch; spans of one token with a similar number of blocks are batched. On a CPU with many keys, the keys are read
in place (attention_rows.py). On a GPU, the kernels of paged.py run.

Layers may see only a window or a chunk (reach.py), and may have sinks [heads]: one more logit of each head's softmax,
without a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from stoker.kernels.attention_rows import RowGroup, gathered_row_group, is_faster_in_place, row_attention, row_group
from stoker.kernels.kv_pages import kv_read
from stoker.kernels.paged import PagedSpans, paged_attention_triton
from stoker.kernels.reach import FULL, Reach
from stoker.kernels.transfer import to_device

# Spans of one token are batched while the shortest has at least this share of the longest one's blocks.
_MIN_FILL = 0.6
# On a CPU, keys that are converted to another dtype are gathered in groups of this size, which stay in its caches.
_CONVERTED_KEYS = 1024
# A softmax adds up keys in groups of the CPU's vector size, and the rest one by one. With a multiple of this number,
# masked keys change nothing.
_KEY_STEP = 16


@dataclass(frozen=True, slots=True)
class SpanShape:
    """`count` tokens from position `start` on, at `first` in the batch. `pages` has the page number of each block's
    first head, from the block with the key `first_key` on. The last `num_drafts` tokens are drafts: then the span is
    computed as `count` spans of one token, so that a verified token gets the bits of a decoded one."""

    first: int
    start: int
    count: int
    pages: list[int]
    num_drafts: int = 0
    first_key: int = 0

    def split(self, block_tokens: int, reach: Reach) -> list[SpanShape]:
        """Return the spans that are computed separately, each with the blocks that it sees."""
        if not self.num_drafts:
            return [self._seen(self.first, self.start, self.count, block_tokens, reach)]
        positions = range(self.start, self.start + self.count)
        return [self._seen(self.first + i, at, 1, block_tokens, reach) for i, at in enumerate(positions)]

    def _seen(self, first: int, start: int, count: int, block_tokens: int, reach: Reach) -> SpanShape:
        begin, end = reach.first_key(start) // block_tokens, (start + count - 1) // block_tokens + 1
        return SpanShape(first, start, count, self.pages[begin:end], first_key=begin * block_tokens)


@dataclass(frozen=True, slots=True)
class SpanGroup:
    """Spans that one call computes: several of one token, or one of several tokens."""

    tokens: Tensor | slice  # which tokens of the batch
    pages: Tensor  # [2 * spans * kv_heads * blocks]: the pages of K, then those of V
    num_spans: int
    num_keys: int  # keys of the longest span
    mask: Tensor | None  # added to the scores; None: every key is visible, or is_causal decides
    is_causal: bool
    dtype: torch.dtype  # in which attention is computed


def group_spans(
    spans: Sequence[SpanShape],
    num_kv_heads: int,
    block_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    in_place: bool = True,
    exact: bool = False,
    reach: Reach = FULL,
) -> list[SpanGroup | RowGroup]:
    """Group the spans of a step, once for all layers of a KV group, which see `reach`. Attention is computed in `dtype`.
    `in_place`: the pages have this dtype, so that keys can be read where they are. `exact`, on a CPU: the bits of a span
    of one token do not depend on the other spans."""
    spans = [part for span in spans for part in span.split(block_tokens, reach)]
    heads = torch.arange(num_kv_heads)

    def page_index(pages: list[list[int]]) -> Tensor:
        keys = torch.tensor(pages)[:, None, :] + heads[None, :, None]  # [spans, heads, blocks]
        return torch.stack([keys, keys + num_kv_heads]).flatten().to(device, non_blocking=True)

    def max_spans(num_blocks: int) -> int:
        if in_place or device.type != "cpu":
            return len(spans)
        return max(1, _CONVERTED_KEYS // (num_blocks * block_tokens))

    groups: list[SpanGroup | RowGroup] = []
    single = sorted((span for span in spans if span.count == 1), key=lambda span: len(span.pages))
    while single:
        longest = len(single[-1].pages)
        taken = [span for span in single[-max_spans(longest) :] if len(span.pages) >= _MIN_FILL * longest]
        single = single[: len(single) - len(taken)]
        if exact:
            longest += -longest % (_KEY_STEP // gcd(_KEY_STEP, block_tokens))
        ends = torch.tensor([span.start + 1 - span.first_key for span in taken])
        begins = torch.tensor([reach.first_key(span.start) - span.first_key for span in taken])
        # Whole blocks, so that the shapes change once per block and not with every token.
        num_keys = longest * block_tokens
        mask = None
        if exact or int(ends.min()) < num_keys or int(begins.max()):
            keys = torch.arange(num_keys)[None, :]
            mask = _mask((keys >= ends[:, None]) | (keys < begins[:, None]), dtype, device)[:, None, :]
        # Pad with the span's own pages: masked values must be finite, and another sequence's memory may not be.
        padded = [span.pages + span.pages[:1] * (longest - len(span.pages)) for span in taken]
        firsts = [span.first for span in taken]
        if in_place and (exact or is_faster_in_place(len(taken) * num_keys, device, dtype)):
            groups.append(row_group(firsts, padded, mask, num_kv_heads, block_tokens))
            continue
        if exact:
            assert mask is not None
            groups.append(gathered_row_group(firsts, page_index(padded), mask, num_kv_heads, dtype))
            continue
        mask = None if mask is None else mask[:, None]
        groups.append(
            SpanGroup(to_device(firsts, device), page_index(padded), len(taken), num_keys, mask, False, dtype)
        )
    for span in spans:
        if span.count == 1:
            continue
        end = span.start + span.count
        is_causal = not span.start and not reach.first_key(end - 1)
        mask = None
        if not is_causal:
            keys, positions = torch.arange(span.first_key, end)[None, :], torch.arange(span.start, end)[:, None]
            mask = _mask((keys > positions) | (keys < reach.first_keys(positions)), dtype, device)
        tokens = slice(span.first, span.first + span.count)
        num_keys = end - span.first_key
        groups.append(SpanGroup(tokens, page_index([span.pages]), 1, num_keys, mask, is_causal, dtype))
    return groups


def _mask(hidden: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what is added to the scores, so that hidden keys have no weight."""
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf")).to(device, non_blocking=True)


def paged_attention(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    spans: Sequence[SpanGroup | RowGroup] | PagedSpans,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention. key and value [tokens, kv_heads, head_dim] are the tokens' own, which the pages hold too. The
    memory of q is reused."""
    if isinstance(spans, PagedSpans):
        return paged_attention_triton(q, key, value, pages, spans, scale, sinks)
    return paged_attention_ref(q, pages, spans, key.shape[1], scale, sinks)


def _row_attention(
    q: Tensor, pages: Tensor, group: RowGroup, num_kv_heads: int, scale: float, sinks: Tensor | None
) -> Tensor:
    head_dim = q.shape[-1]
    if group.gathered is None:
        keys, values = pages.view(-1, head_dim), pages[num_kv_heads:].view(-1, head_dim)
        return row_attention(q, keys, values, group, scale, sinks)
    assert group.dtype is not None
    keys, values = kv_read(pages, group.gathered, head_dim, group.dtype).view(2, -1, head_dim)
    return row_attention(q.to(group.dtype), keys, values, group, scale, sinks).to(q.dtype)


def _attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, sinks: Tensor
) -> Tensor:
    """Compute attention of [..., rows, head_dim]. sinks [..., rows or 1, 1]. Torch's fused attention has no sinks."""
    scores = query @ key.transpose(-2, -1) * scale
    if mask is not None:
        scores += mask
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value


def _attend_span(
    query: Tensor, key: Tensor, value: Tensor, group: SpanGroup, scale: float, sinks: Tensor | None
) -> Tensor:
    """query [kv_heads, shared, tokens, head_dim]   key, value: the same with keys in place of tokens"""
    if sinks is None:
        return scaled_dot_product_attention(query, key, value, group.mask, is_causal=group.is_causal, scale=scale)
    mask = group.mask
    if group.is_causal:
        mask = _mask(torch.ones(query.shape[2], key.shape[2]).triu_(1).bool(), query.dtype, query.device)
    by_head = zip(query, key, value, sinks.view(len(query), -1, 1, 1), strict=True)  # few scores at a time
    return torch.stack([_attend_with_sinks(q, k, v, mask, scale, own) for q, k, v, own in by_head])


def paged_attention_ref(
    q: Tensor,
    pages: Tensor,
    groups: Sequence[SpanGroup | RowGroup],
    num_kv_heads: int,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    out = torch.empty_like(q)
    num_heads, head_dim = q.shape[1:]
    shared = num_heads // num_kv_heads  # query heads per KV head
    for group in groups:
        if isinstance(group, RowGroup):
            out[group.tokens] = _row_attention(q[group.tokens], pages, group, num_kv_heads, scale, sinks)
            continue
        gathered = kv_read(pages, group.pages, head_dim, group.dtype)
        gathered = gathered.view(2, group.num_spans, num_kv_heads, -1, head_dim)
        key, value = gathered[:, :, :, : group.num_keys]
        own_q = q[group.tokens].to(group.dtype)
        if isinstance(group.tokens, slice):
            # The query heads of one KV head are a batch over the same keys: expanded, not copied.
            query = own_q.view(-1, num_kv_heads, shared, head_dim).permute(1, 2, 0, 3)
            key, value = (part[0, :, None].expand(-1, shared, -1, -1) for part in (key, value))
            attended = _attend_span(query, key, value, group, scale, sinks)
            out[group.tokens] = attended.permute(2, 0, 1, 3).reshape(-1, num_heads, head_dim)
        else:
            # One token per span: the query heads of one KV head take the place of a longer span's tokens.
            query = own_q.view(group.num_spans, num_kv_heads, shared, head_dim)
            if sinks is None:
                attended = scaled_dot_product_attention(query, key, value, group.mask, scale=scale)
            else:
                own = sinks.view(num_kv_heads, shared, 1)
                attended = _attend_with_sinks(query, key, value, group.mask, scale, own)
            out[group.tokens] = attended.reshape(-1, num_heads, head_dim).to(q.dtype)
    return out

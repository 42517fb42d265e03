"""Latent attention on a rank that holds a part of the context: the rank's part of the result, to be merged with those of the
other ranks.

query [tokens, heads, latent + rope]: absorbed (mla.py), the heads of all ranks that hold a part
-> found [tokens, heads, latent]: attention over this rank's keys; sums [tokens, heads]: the logarithm to base 2 of each row's
   sum of weights, minus infinity if the rank has none of its keys

`merge_parts` (split_parts.py) has the whole result. A new prompt needs no other rank: every rank computes the entries of all
its tokens (mla.expanded).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.kernels.attention import SpanShape
from stoker.kernels.block_split import BlockSplit
from stoker.kernels.latent_pages import entries_read
from stoker.kernels.mla import LOG2_E, LatentShape, latent_attention_triton
from stoker.kernels.paged import PagedSpans


@dataclass(frozen=True, slots=True)
class SplitSpan:
    """Tokens of a sequence that attend to this rank's keys."""

    tokens: slice  # of those that are not computed as a whole
    pages: Tensor  # [blocks]
    visible: Tensor  # [tokens, keys]


@dataclass(frozen=True, slots=True)
class SplitSpans:
    """Which tokens of a step attend to which, for the reference."""

    whole: tuple[slice, ...]  # new prompts, whose keys are all in the step
    rest: Tensor  # [tokens]: those of `spans`
    spans: list[SplitSpan]
    dtype: torch.dtype  # in which attention is computed


def split_spans(
    shapes: Sequence[SpanShape],
    block_tokens: int,
    split: BlockSplit,
    device: torch.device,
    dtype: torch.dtype,
    exact: bool,
) -> SplitSpans:
    """Prepare the spans of a step, once for all layers. `exact`: a token is computed in the same way in every span."""
    whole: list[slice] = []
    spans: list[SplitSpan] = []
    rest: list[int] = []
    page_tokens = split.page_tokens(block_tokens)
    first_keys = torch.arange(page_tokens) + split.index * page_tokens
    for shape in shapes:
        if shape.start == 0 and shape.count > 1 and not exact:
            whole.append(slice(shape.first, shape.first + shape.count))
            continue
        tokens = slice(len(rest), len(rest) + shape.count)
        rest += range(shape.first, shape.first + shape.count)
        positions = torch.arange(shape.start, shape.start + shape.count)
        keys = (torch.arange(len(shape.pages))[:, None] * block_tokens + first_keys).flatten()
        visible = (keys[None, :] <= positions[:, None]).to(device)
        spans.append(SplitSpan(tokens, torch.tensor(shape.pages, device=device), visible))
    return SplitSpans(tuple(whole), torch.tensor(rest, dtype=torch.int64, device=device), spans, dtype)


def split_attention_ref(
    query: Tensor, pages: Tensor, spans: SplitSpans, shape: LatentShape, scale: float
) -> tuple[Tensor, Tensor]:
    """The tokens of the query are `spans.rest`. The result has the dtype of attention."""
    query = query.to(spans.dtype)
    found, sums = query.new_empty(*query.shape[:2], shape.latent), query.new_empty(query.shape[:2])
    for span in spans.spans:
        keys = entries_read(pages, span.pages, shape.latent, shape.rope, spans.dtype).view(-1, shape.width)
        # Keys that no token of the span sees may be anything, and no number times infinity is zero.
        keys = keys.where(span.visible.any(0)[:, None], 0.0)
        scores = torch.matmul(query[span.tokens], keys.t()) * scale
        scores = scores.masked_fill(~span.visible[:, None], float("-inf"))
        row_sums = scores.logsumexp(-1)
        weights = torch.exp(scores - row_sums.where(row_sums > float("-inf"), 0.0)[..., None])
        found[span.tokens] = torch.matmul(weights, keys[:, : shape.latent])
        sums[span.tokens] = row_sums * LOG2_E
    return found, sums


def split_attention_triton(
    query: Tensor, pages: Tensor, spans: PagedSpans, split: BlockSplit, shape: LatentShape, scale: float
) -> tuple[Tensor, Tensor]:
    latents, turned = query.split([shape.latent, shape.rope], -1)
    sums = torch.full(query.shape[:2], float("-inf"), dtype=torch.float32, device=query.device)
    return latent_attention_triton(latents.contiguous(), turned, pages, spans, scale, split, sums), sums


def split_attention(
    query: Tensor, pages: Tensor, spans: SplitSpans | PagedSpans, split: BlockSplit, shape: LatentShape, scale: float
) -> tuple[Tensor, Tensor]:
    if isinstance(spans, PagedSpans):
        return split_attention_triton(query, pages, spans, split, shape, scale)
    return split_attention_ref(query, pages, spans, shape, scale)

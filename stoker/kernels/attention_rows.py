"""Attention of one token per span, reading the keys in place.

q [spans, heads, head_dim]   slots [slots, head_dim]   -> like q

Gathering pages first reads every key twice and writes it once, which takes four times as long at 32 spans of 1,000
keys. Torch has operators for both halves: `sampled_addmm` computes the scores at the positions of a sparse pattern, and
`embedding_bag` the weighted sums of the values.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from stoker.kernels.transfer import to_device

# Reading in place is faster from this many keys on; below it, the calls cost more than the copies.
_MIN_KEYS = 2048
# Columns that a sink takes before the keys, all but one of them hidden: with the CPU's vector size, the keys stay where
# they are in the order in which a softmax adds them up.
_SINK_COLUMNS = 16

with warnings.catch_warnings():  # torch warns once per process that sparse patterns are a beta feature
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor([0, 1], [0], [0.0], (1, 1), check_invariants=False)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Spans of one token."""

    tokens: Tensor  # which tokens of the batch
    slots: Tensor  # [spans * kv_heads, keys]: the slot of each key, counted from the first K of `gathered` or the layer
    mask: Tensor | None  # [spans, 1, keys], added to the scores
    # [2 * spans * kv_heads * blocks]: the pages of K, then those of V, that are converted first; None: read in place
    gathered: Tensor | None = None
    dtype: torch.dtype | None = None  # to which they are converted


def is_faster_in_place(num_keys: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if `row_attention` is faster than gathering the pages."""
    return device.type == "cpu" and dtype in (torch.float32, torch.float64) and num_keys >= _MIN_KEYS


def row_group(
    firsts: Sequence[int], pages: Sequence[Sequence[int]], mask: Tensor | None, num_kv_heads: int, block_tokens: int
) -> RowGroup:
    """Build a group. `pages` [spans, blocks] has the page number of each block's first head."""
    keys = torch.tensor(pages)[:, None, :, None] + torch.arange(num_kv_heads)[None, :, None, None]
    slots = keys * block_tokens + torch.arange(block_tokens)
    return RowGroup(to_device(firsts, torch.device("cpu")), slots.view(len(pages) * num_kv_heads, -1), mask)


def gathered_row_group(
    firsts: Sequence[int], pages: Tensor, mask: Tensor, num_kv_heads: int, dtype: torch.dtype
) -> RowGroup:
    """Build a group whose pages are converted to `dtype` first. `mask` [spans, 1, keys] covers all of them."""
    num_lists = len(firsts) * num_kv_heads
    slots = torch.arange(num_lists * mask.shape[-1]).view(num_lists, -1)
    return RowGroup(to_device(firsts, torch.device("cpu")), slots, mask, pages, dtype)


def row_attention(
    q: Tensor, keys: Tensor, values: Tensor, group: RowGroup, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Compute attention. sinks [heads]: one more logit of each head's softmax, without a value."""
    num_spans, num_heads, head_dim = q.shape
    num_keys = group.slots.shape[1]
    shared = num_spans * num_heads // len(group.slots)  # query heads per KV head
    slots = group.slots.repeat_interleave(shared, 0)
    starts = torch.arange(0, slots.numel() + 1, num_keys)
    zeros = torch.zeros(slots.numel(), dtype=q.dtype)
    pattern = torch.sparse_csr_tensor(starts, slots.view(-1), zeros, (len(slots), len(keys)), check_invariants=False)
    scores = torch.sparse.sampled_addmm(pattern, q.view(-1, head_dim), keys.t(), beta=0.0, alpha=scale).values()
    scores = scores.view(num_spans, num_heads, num_keys)
    if group.mask is not None:
        scores += group.mask
    if sinks is not None:
        before = scores.new_full((num_spans, num_heads, _SINK_COLUMNS), float("-inf"))
        before[..., 0] = sinks
        scores = torch.cat([before, scores], -1)
    weights = scores.softmax(-1)[..., -num_keys:].reshape(-1, num_keys)
    return embedding_bag(slots, values, per_sample_weights=weights, mode="sum").view(q.shape)

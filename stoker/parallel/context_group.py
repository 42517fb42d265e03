"""The ranks that hold the parts of the same KV blocks: how attention over a split context becomes that over all of it.

Every rank has the queries of its own heads, and the keys of its own part of each block. So the ranks exchange queries, each
computes all heads over its keys, and each merges the parts of its own heads. Parts are merged in the order of the ranks.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from stoker.kernels.split_parts import merge_parts
from stoker.parallel.collectives import Collectives


class ContextGroup(Protocol):
    """This rank among those that hold a part of each block."""

    num_ranks: int

    def gather_heads(self, query: Tensor) -> Tensor:
        """[tokens, heads, width] of each rank -> [tokens, heads of all ranks, width]"""

    def merge(self, found: Tensor, sums: Tensor) -> Tensor:
        """Return [tokens, heads, width], this rank's heads over all keys. `found` [tokens, heads of all ranks, width] and `sums`
        [tokens, heads of all ranks] are attention over this rank's keys (kernels/mla_split.py)."""


class WholeContext:
    """One rank that holds whole blocks."""

    num_ranks = 1

    def gather_heads(self, query: Tensor) -> Tensor:
        return query

    def merge(self, found: Tensor, sums: Tensor) -> Tensor:
        return found


WHOLE_CONTEXT = WholeContext()


class SplitContext:
    """One of several ranks."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self.num_ranks = collectives.num_ranks

    def gather_heads(self, query: Tensor) -> Tensor:
        return torch.cat(self._collectives.gather(query.contiguous()), 1)

    def merge(self, found: Tensor, sums: Tensor) -> Tensor:
        """The sums travel as further columns of the parts, in one message."""
        num_tokens, num_heads, width = found.shape
        columns, by_rank = sums.dtype.itemsize // found.dtype.itemsize, (num_tokens, self.num_ranks, -1)
        packed = found.new_empty(self.num_ranks, num_tokens, num_heads // self.num_ranks, width + columns)
        packed[..., :width] = found.view(*by_rank, width).transpose(0, 1)
        packed[..., width:] = sums[..., None].view(found.dtype).view(*by_rank, columns).transpose(0, 1)
        received = self._collectives.swap(packed)
        parts = [part[..., :-columns] for part in received]
        return merge_parts(parts, [part[..., -columns:].contiguous().view(sums.dtype)[..., 0] for part in received])

"""Cuts the work of attention into pieces whose keys end at fixed positions: the cutter for numerics=exact.

The parts of a context are merged in order, and each rounds once. So where parts end must not depend on the batch. The
first part has about 256 keys, and parts grow with their number: a short context is still computed by several programs,
and a long one has a number of parts that is about the square root of its length, because they are merged one after the
other. The keys of tiles (prefill) are not split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from stoker.kernels.paged import Cutter, SpanForm, free_tokens, most_shared, span_tile_rows, tile_tokens
from stoker.kernels.pieces import FIELDS, Ints, cut_tokens

_FIRST_KEYS = 256
_MAX_TOKENS = 16  # of a span that verifies drafts
_GROWTH = 8  # parts after which the size has grown by that of the first part


@dataclass(frozen=True, slots=True)
class ExactCutter(Cutter):
    max_blocks: int = 1  # of a sequence
    total_blocks: int = 1  # of the KV cache

    @classmethod
    def for_model(
        cls,
        heads: Sequence[tuple[int, int]],
        block_tokens: int,
        dtype: torch.dtype,
        max_blocks: int,
        total_blocks: int,
    ) -> ExactCutter:
        """`heads` has the query heads and the KV heads of each group."""
        shared, num_kv_heads = most_shared(heads), max(kv_heads for _, kv_heads in heads)
        form = SpanForm(free_tokens(shared), guarded=True, exact=True)
        return cls(num_kv_heads, tile_tokens(shared, dtype), block_tokens, form, max_blocks, max(1, total_blocks))

    def needed_singles(self, count: Ints, start: Ints) -> int:
        if not len(count):
            return 0
        _first, count, start = cut_tokens(start, count, start, self.form.span_tokens)
        return int(self._parts(count, start).sum())

    def max_singles(self, count: int, tokens: int = 1) -> int:
        """Upper bound of the number of pieces, if the sequences together fill the KV cache at most once. A step of
        sequences that share long prefixes may need more; then it is not captured, or takes a larger captured step."""
        if not count:
            return 0
        blocks = min(self.max_blocks, -(-self.total_blocks // count) + 1)
        per_span = int(np.searchsorted(part_ends(self.block_tokens, self.max_blocks), blocks)) + 1
        return count * -(-tokens // self.form.span_tokens) * per_span

    def max_groups(self, max_rows: int) -> int:
        """Upper bound of the number of pieces of a step of `max_rows` sequences, whatever they share."""
        return max_rows * -(-_MAX_TOKENS // self.form.span_tokens) * len(part_ends(self.block_tokens, self.max_blocks))

    def partial_bytes(self, max_rows: int, shared: int, head_dim: int) -> int:
        """Return the memory for partial results of a captured step of `max_rows` sequences, if `shared` query heads
        share a KV head."""
        rows = self.max_singles(max_rows) * self.num_kv_heads * span_tile_rows(self.form, shared)
        return rows * (head_dim + 1) * torch.float32.itemsize

    def room(self, needed: int) -> int:
        return needed

    def max_tiles(self, count: int) -> int:
        return count

    def singles(self, first: Ints, count: Ints, start: Ints, room: int) -> Ints:
        first, count, start = cut_tokens(first, count, start, self.form.span_tokens)
        return self._pieces(first, count, start, self._parts(count, start))

    def tiles(self, first: Ints, count: Ints, start: Ints, room: int) -> Ints:
        first, count, start = cut_tokens(first, count, start, self.tile_tokens)
        return self._pieces(first, count, start, np.ones_like(count))

    def _parts(self, count: Ints, start: Ints) -> Ints:
        blocks = (start + count - 1) // self.block_tokens + 1
        return np.searchsorted(part_ends(self.block_tokens, self.max_blocks), blocks) + 1

    def _pieces(self, first: Ints, count: Ints, start: Ints, parts: Ints) -> Ints:
        """Return [pieces, FIELDS], the spans with the most key blocks first, and each one's parts in order."""
        blocks = (start + count - 1) // self.block_tokens + 1
        order = np.argsort(-blocks, kind="stable")
        group = parts[order].cumsum() - parts[order]
        order, group = order.repeat(parts[order]), group.repeat(parts[order])
        number = np.arange(len(group)) - group
        ends = part_ends(self.block_tokens, self.max_blocks)
        begins = np.concatenate([[0], ends])
        pieces = np.empty((len(group), FIELDS), dtype=np.int64)
        pieces[:, 0] = first[order]
        pieces[:, 1] = count[order]
        pieces[:, 2] = begins[number]
        is_last = number == parts[order] - 1
        pieces[:, 3] = np.where(is_last, blocks[order], ends[np.minimum(number, len(ends) - 1)])
        pieces[:, 4] = group
        pieces[:, 5] = parts[order]
        return pieces


@cache
def part_ends(block_tokens: int, max_blocks: int) -> Ints:
    """Return the key blocks at which parts end, up to the last that a context of `max_blocks` blocks can reach."""
    first = max(1, _FIRST_KEYS // block_tokens)
    ends, number = [first], 1
    while ends[-1] < max_blocks:
        ends.append(ends[-1] + first + first * number // _GROWTH)
        number += 1
    return np.array(ends)

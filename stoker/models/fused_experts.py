"""Rules for checkpoints that have one tensor for all experts of a layer: which part of it a rank reads.

A rank takes some of the experts, a part of the inner width of each, or both. The inner width is an axis of each tensor. gate and
up share the axis, and either alternate on it or come one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from stoker.layers.moe import MoeConfig
from stoker.models.dense import cut_of, part_of
from stoker.models.family import Rule, SourceSlice
from stoker.parallel.shard import Shard


class FusedCuts:
    """The slices of one rank. `moe` are the experts of the whole model."""

    def __init__(self, moe: MoeConfig, shard: Shard) -> None:
        self._width, self._num_experts = moe.intermediate_size, moe.num_experts
        self._held = shard.experts(moe.num_experts)
        self._part = part_of(moe.intermediate_size, shard.expert_piece)

    @property
    def experts(self) -> SourceSlice | None:
        """The slice of a tensor that has no inner width."""
        return cut_of(0, self._held, self._num_experts)

    def inner(self, axis: int, block: int = 1) -> SourceSlice | None:
        """The slice of a tensor that has the inner width on an axis. `block` values of it are one entry."""
        return self._within(axis, 1, block)

    def alternating(self, axis: int) -> SourceSlice | None:
        """The slice of a tensor that has gate and up on an axis, in turns."""
        return self._within(axis, 2, 1)

    def _within(self, axis: int, times: int, block: int) -> SourceSlice | None:
        part = range(self._part.start * times // block, self._part.stop * times // block)
        cut = cut_of(axis, part, self._width * times // block)
        return self.experts if cut is None else replace(cut, rows=self.experts)

    def gate_then_up(self, axis: int, source: str, target: str) -> Iterator[Rule]:
        """Return the rules of a tensor that has all of gate and then all of up on an axis: see FusedExperts."""
        if len(self._part) == self._width:
            yield Rule(source, target, cut=self.experts)
            return
        for number, expert in enumerate(self._held):
            rows = SourceSlice(0, expert, 1, self._num_experts)
            for half in range(2):
                first = half * self._width + self._part.start
                cut = SourceSlice(axis, first, len(self._part), 2 * self._width, rows)
                yield Rule(source, target, 2 * number + half, 1, cut)

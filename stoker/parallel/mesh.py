"""Mesh: what the layers of one rank need of the other ranks. A mesh of one rank costs nothing."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from stoker.parallel.collectives import Collectives
from stoker.parallel.context_group import WHOLE_CONTEXT, ContextGroup, SplitContext
from stoker.parallel.shard import Shard


class Mesh(Protocol):
    """This rank among those of its stage, which split each layer."""

    is_first: bool
    """True on the rank that samples where the ranks cannot all do the same: with grammars, penalties or logprobs."""

    context: ContextGroup
    """The ranks that hold the parts of the same KV blocks."""

    def combine(self, partial: Tensor) -> Tensor:
        """Return the sum of the ranks' partial results, in the order of the ranks. The memory may be reused."""

    def gather_logits(self, part: Tensor, vocab_size: int) -> Tensor:
        """Return the logits of the whole vocabulary: [rows, this rank's tokens] -> [rows, vocab]."""

    def share(self, token_ids: Tensor) -> Tensor:
        """Return the token ids [heads] of the first rank."""


class AloneMesh:
    """The mesh of a single rank."""

    is_first = True
    context: ContextGroup = WHOLE_CONTEXT

    def combine(self, partial: Tensor) -> Tensor:
        return partial

    def gather_logits(self, part: Tensor, vocab_size: int) -> Tensor:
        return part

    def share(self, token_ids: Tensor) -> Tensor:
        return token_ids


ALONE = AloneMesh()


class StageMesh:
    """The ranks of one stage."""

    def __init__(self, collectives: Collectives, shard: Shard, context: Collectives | None = None) -> None:
        """`context` has the ranks that split the context; None: each has all of it."""
        self._collectives = collectives
        self.context: ContextGroup = WHOLE_CONTEXT if context is None else SplitContext(context)
        self._shard = shard
        self.is_first = collectives.rank == 0

    def combine(self, partial: Tensor) -> Tensor:
        return self._collectives.sum(partial)

    def gather_logits(self, part: Tensor, vocab_size: int) -> Tensor:
        """The parts of ranks may differ by one token, so that they are padded on their way."""
        widths = [len(Shard(rank, self._shard.tp).vocabulary(vocab_size)) for rank in range(self._shard.tp)]
        widest = max(widths)
        if part.shape[1] < widest:
            part = torch.nn.functional.pad(part, (0, widest - part.shape[1]))
        parts = self._collectives.gather(part.contiguous())
        return torch.cat([found[:, :width] for found, width in zip(parts, widths, strict=True)], 1)

    def share(self, token_ids: Tensor) -> Tensor:
        return self._collectives.gather(token_ids.contiguous())[0]


def mesh_of(collectives: Collectives, shard: Shard, context: Collectives | None = None) -> Mesh:
    """Return the mesh of the ranks of a stage."""
    return ALONE if shard.tp == 1 else StageMesh(collectives, shard, context)

"""Stages: how the hidden states of a step pass through the stages of a pipeline.

The first stage has the embedding and the head. The last one returns the hidden states of the tokens that are followed by a
sampled one, and the first one samples. So no other stage needs the sampled tokens: a row in flight is not planned again, and
the next plan has its tokens. The device knows which drafts of a step exist; the first stage passes on their positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from stoker.parallel.collectives import Collectives, Transfer

FindTokens = Callable[[], tuple[Tensor, Tensor]]


class Stages(Protocol):
    """This rank's place in the pipeline."""

    is_first: bool
    is_deferred: bool
    """True if the first stage must wait for other stages before it can sample."""

    def tokens(self, num_tokens: int, find: FindTokens) -> tuple[Tensor, Tensor]:
        """Return ids and positions of the step's tokens. `find` computes them from the rows; only the first stage can."""

    def entering(self, num_tokens: int) -> Tensor | None:
        """Return the hidden states [tokens, hidden] of the stage before; None in the first stage."""

    def leave(self, hidden: Tensor, heads: Tensor) -> None:
        """Pass on the hidden states [tokens, hidden] of this stage. `heads` are the tokens whose logits are needed."""

    def result(self, hidden: Tensor, heads: Tensor) -> Tensor:
        """Return the hidden states of the heads after the last stage; called in the first stage, once per step."""


class OneStage:
    """All layers on one rank, or on the ranks of one stage."""

    is_first = True
    is_deferred = False

    def tokens(self, num_tokens: int, find: FindTokens) -> tuple[Tensor, Tensor]:
        return find()

    def entering(self, num_tokens: int) -> Tensor | None:
        return None

    def leave(self, hidden: Tensor, heads: Tensor) -> None:
        pass

    def result(self, hidden: Tensor, heads: Tensor) -> Tensor:
        return hidden[heads]


class PipelineStage:
    """One of several stages. `collectives` has the ranks with this one's part of each stage, in the order of the stages."""

    is_deferred = True

    def __init__(self, collectives: Collectives, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._collectives = collectives
        self._stage, self._last = collectives.rank, collectives.num_ranks - 1
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device
        self._transfers: deque[Transfer] = deque()
        self.is_first = self._stage == 0

    def tokens(self, num_tokens: int, find: FindTokens) -> tuple[Tensor, Tensor]:
        if self.is_first:
            token_ids, positions = find()
        else:
            positions = torch.empty(num_tokens, dtype=torch.int64, device=self._device)
            self._collectives.receive(positions, self._stage - 1)
            token_ids = torch.zeros_like(positions)
        if self._stage < self._last:
            self._send(positions, self._stage + 1)
        return token_ids, positions

    def entering(self, num_tokens: int) -> Tensor | None:
        return None if self.is_first else self._received(num_tokens, self._stage - 1)

    def leave(self, hidden: Tensor, heads: Tensor) -> None:
        if self._stage < self._last:
            self._send(hidden, self._stage + 1)
        elif len(heads):
            self._send(hidden[heads], 0)

    def result(self, hidden: Tensor, heads: Tensor) -> Tensor:
        return self._received(len(heads), self._last)

    def _received(self, num_tokens: int, stage: int) -> Tensor:
        into = torch.empty(num_tokens, self._hidden_size, dtype=self._dtype, device=self._device)
        self._collectives.receive(into, stage)
        return into

    def _send(self, x: Tensor, stage: int) -> None:
        """Send without waiting. At most two steps per stage are in flight, so that older transfers are done or nearly so."""
        self._transfers.append(self._collectives.send(x.contiguous(), stage))
        while len(self._transfers) > 4 * (self._last + 1):
            self._transfers.popleft().wait()


ONE_STAGE = OneStage()

"""Stages: how the hidden states of a step pass through the stages of a pipeline.

The first stage has the embedding and the head. The last one returns the hidden states of the tokens that are followed by a
sampled one, and the first one samples. So no other stage needs the sampled tokens: a row in flight is not planned again, and
the next plan has its tokens. The device knows which drafts of a step exist; the first stage passes on their positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from stoker.parallel.collectives import Collectives, Transfer

# Steps whose tensors are kept before a stage waits for their transfers. On a GPU the wait is one of its stream.
_KEPT_STEPS, _KEPT_GPU_STEPS = 2, 1


def kept_bytes_per_token(hidden_size: int, itemsize: int) -> int:
    """Return what a stage on a GPU holds per token for its exchanges, besides what a step needs: beside captured steps, the
    buffer that they read; beside a step that is not captured, what earlier ones send."""
    return _KEPT_GPU_STEPS * hidden_size * itemsize


FindTokens = Callable[[], tuple[Tensor, Tensor]]
Arrival = Callable[[], Tensor]  # waits for a tensor that is being received


class Stages(Protocol):
    """This rank's place in the pipeline."""

    is_first: bool
    first_layer: int
    is_deferred: bool
    """True if the first stage must wait for other stages before it can sample."""

    def tokens(self, num_tokens: int, find: FindTokens) -> tuple[Tensor, Tensor]:
        """Return ids and positions of the step's tokens. `find` computes them from the rows; only the first stage can."""

    def entering(self, num_tokens: int) -> Tensor | None:
        """Return the hidden states [tokens, hidden] of the stage before; None in the first stage."""

    def leave(self, hidden: Tensor, heads: Tensor) -> None:
        """Pass on the hidden states [tokens, hidden] of this stage. `heads` are the tokens whose logits are needed."""

    def result(self, hidden: Tensor, heads: Tensor) -> Arrival:
        """Start to receive the hidden states of the heads after the last stage; called in the first stage, once per step."""

    def is_here(self, layer: int) -> bool:
        """Return True if this stage has the hidden states that enter a layer of the model, or that leave its last one. At the
        border of two stages, they are those that leave the first of the two."""

    def send_feature(self, hidden: Tensor) -> None:
        """Send hidden states [tokens, hidden] to the first stage, before those of `leave`."""

    def receive_feature(self, num_tokens: int, layer: int) -> Arrival:
        """Start to receive the hidden states that enter a layer of a later stage; called in the first stage, before `result`."""


class OneStage:
    """All layers on one rank, or on the ranks of one stage."""

    is_first = True
    first_layer = 0
    is_deferred = False

    def tokens(self, num_tokens: int, find: FindTokens) -> tuple[Tensor, Tensor]:
        return find()

    def entering(self, num_tokens: int) -> Tensor | None:
        return None

    def leave(self, hidden: Tensor, heads: Tensor) -> None:
        pass

    def result(self, hidden: Tensor, heads: Tensor) -> Arrival:
        return lambda: hidden[heads]

    def is_here(self, layer: int) -> bool:
        return True

    def send_feature(self, hidden: Tensor) -> None:
        raise AssertionError("there is no other stage")

    def receive_feature(self, num_tokens: int, layer: int) -> Arrival:
        raise AssertionError("there is no other stage")


class PipelineStage:
    """One of several stages. `collectives` has the ranks with this one's part of each stage, in the order of the stages."""

    is_deferred = True

    def __init__(
        self,
        collectives: Collectives,
        layers: Sequence[range],
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        returning: Collectives | None = None,
    ) -> None:
        """`layers` are those of each stage. `returning` is a second group of the same ranks, for what goes back to the first
        stage. NCCL needs one: it executes what two ranks exchange in the order of the calls, and both may call `send` first."""
        self._collectives, self._returning, self._layers = collectives, returning or collectives, layers
        self.first_layer = layers[collectives.rank].start
        self._stage, self._last = collectives.rank, collectives.num_ranks - 1
        self.hidden_size, self._dtype, self._device = hidden_size, dtype, device
        self._step: list[Transfer] = []  # of the step that is being sent
        self._sent: deque[list[Transfer]] = deque()  # of each earlier step
        self._kept_steps = _KEPT_GPU_STEPS if device.type == "cuda" else _KEPT_STEPS * collectives.num_ranks
        self.is_first, self.is_last = self._stage == 0, self._stage == self._last

    def tokens(self, num_tokens: int, find: FindTokens) -> tuple[Tensor, Tensor]:
        if self.is_first:
            token_ids, positions = find()
        else:
            positions = torch.empty(num_tokens, dtype=torch.int64, device=self._device)
            self._collectives.receive(positions, self._stage - 1).wait()
            token_ids = torch.zeros_like(positions)
        if self._stage < self._last:
            self._send(positions, self._stage + 1)
        return token_ids, positions

    def entering(self, num_tokens: int) -> Tensor | None:
        return None if self.is_first else self.receive_entering(self._empty(num_tokens))

    def receive_entering(self, into: Tensor) -> Tensor:
        """Receive the hidden states [tokens, hidden] of the stage before, in any stage but the first."""
        self._collectives.receive(into, self._stage - 1).wait()
        return into

    def leave(self, hidden: Tensor, heads: Tensor) -> None:
        if not self.is_last:
            self._send(hidden, self._stage + 1)
        elif len(heads):
            self._return(hidden[heads])
        self._sent.append(self._step)
        self._step = []
        while len(self._sent) > self._kept_steps:
            for transfer in self._sent.popleft():
                transfer.wait()

    def result(self, hidden: Tensor, heads: Tensor) -> Arrival:
        return self.receive_result(self._empty(len(heads)))

    def receive_result(self, into: Tensor) -> Arrival:
        """Start to receive what `result` returns, [heads, hidden]."""
        return self._arrival(into, self._last)

    def is_here(self, layer: int) -> bool:
        return self._stage_of(layer) == self._stage

    def send_feature(self, hidden: Tensor) -> None:
        self._return(hidden.clone())  # the next layer reuses the memory

    def receive_feature(self, num_tokens: int, layer: int) -> Arrival:
        return self._arrival(self._empty(num_tokens), self._stage_of(layer))

    def _arrival(self, into: Tensor, stage: int) -> Arrival:
        """Start to receive from a later stage.

        With gloo, a tensor is sent when its receiver is ready. If that were only when the tensor is needed, this stage would
        wait until a thread of the other rank, whose cores compute the next step by then, has sent it.
        """
        transfer = self._returning.receive(into, stage)

        def arrived() -> Tensor:
            transfer.wait()
            return into

        return arrived

    def _stage_of(self, layer: int) -> int:
        return next(stage for stage, held in enumerate(self._layers) if layer <= held.stop)

    def _empty(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows, self.hidden_size, dtype=self._dtype, device=self._device)

    def _send(self, x: Tensor, stage: int) -> None:
        """Send without waiting. Some steps later, `leave` waits for transfers that are done by then, or nearly so."""
        self._step.append(self._collectives.send(x.contiguous(), stage))

    def _return(self, x: Tensor) -> None:
        """Send to the first stage, without waiting."""
        self._step.append(self._returning.send(x.contiguous(), 0))


ONE_STAGE = OneStage()

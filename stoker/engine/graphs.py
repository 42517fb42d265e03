"""StepGraphs: whole steps captured as CUDA graphs, for a set of shapes, and replayed.

Launching a step's kernels from Python takes the host several times longer than the GPU needs to run them. A captured
step has room for a number of tokens, attention work items and sampling rows. A smaller step is padded; padding writes
nothing. Some shapes are captured before the engine serves requests. The others are captured while it is idle, or when
they were missing several times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from stoker.engine.device_drafter import NO_GUESSES, DraftStep, Guesses
from stoker.engine.packed import StepInputs, StepShape

# After this many steps that had to run in a larger shape, the missing shape is captured at once, even under load.
_MAX_MISSES = 8
_GUESSES_OF_EACH_KIND = 2  # the first one and a further one

_Result = TypeVar("_Result")


class GraphOutputs(Protocol):
    """What a captured step returns, a dataclass."""

    @property
    def guesses(self) -> Guesses:
        """The guesses of a draft model after the step."""

    def borrowed(self: _Result, guesses: Guesses) -> _Result:
        """Return the outputs of a captured step: large tensors do not keep their memory, and the guesses are captured ones."""


_Outputs = TypeVar("_Outputs", bound=GraphOutputs)


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What a step returns. A head is a token whose logits are computed."""

    logits: Tensor | None  # [heads, vocab]; None without heads
    sampled: Tensor  # [heads]: the sampled tokens; undefined for heads that do not sample
    counts: Tensor  # [heads]: see kernels/verify.py
    token_ids: Tensor  # [tokens]: the step's tokens, with the drafts that were taken from tapes
    positions: Tensor  # [tokens]
    draft: DraftStep
    guesses: Guesses  # of a draft model, after the step

    def borrowed(self, guesses: Guesses) -> StepOutputs:
        logits = None if self.logits is None else borrow(self.logits)
        features = self.draft.features
        draft = replace(self.draft, features=borrow(features) if features.is_cuda else features)
        return replace(self, logits=logits, draft=draft, guesses=guesses)


@dataclass(frozen=True, slots=True)
class CapturedStep(Generic[_Outputs]):
    """A captured graph with its input and output buffers."""

    shape: StepShape
    inputs: StepInputs
    outputs: _Outputs
    graph: torch.cuda.CUDAGraph

    def run(self, packed: Tensor, num_guesses: int) -> _Outputs:
        """Replay the step, and make guesses after it. The outputs are valid until the next captured step runs."""
        self.inputs.packed.copy_(packed, non_blocking=True)
        self.graph.replay()
        self.outputs.guesses.make(num_guesses)
        return self.outputs


class StepGraphs(Generic[_Outputs]):
    """The captured steps of one model, or of a part of it. What `forward` reads besides its inputs stays at its address."""

    def __init__(
        self,
        forward: Callable[[StepInputs], _Outputs],
        first: Sequence[StepShape],
        rest: Sequence[StepShape],
        device: torch.device,
    ) -> None:
        """`first` shapes are captured before the engine serves requests, the `rest` later."""
        self._forward = forward
        self._device = device
        self._num_first = len(first)
        # Large shapes first: the smaller ones then reuse their memory.
        self._uncaptured = [shape for shapes in (first, rest) for shape in sorted(shapes, key=_cost, reverse=True)]
        self._by_cost = sorted(self._uncaptured, key=_cost)
        self._captured: dict[StepShape, CapturedStep[_Outputs]] = {}
        self._missed: Counter[StepShape] = Counter()

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    @cached_property
    def _pool(self) -> Any:
        """The memory pool of all graphs. They share it, because only one of them runs at a time."""
        return torch.cuda.graph_pool_handle()

    def dry_run(self, *, with_rest: bool) -> None:
        """Run a step of each first shape, or of each shape, without capturing it."""
        for shape in self._uncaptured[: None if with_rest else self._num_first]:
            self._forward(StepInputs.empty(shape, self._device)).guesses.make(_GUESSES_OF_EACH_KIND)

    def capture_first(self) -> None:
        for _ in range(self._num_first):
            self.capture_next()

    def capture_next(self) -> bool:
        """Capture one more shape. Return False if none was left."""
        if not self._uncaptured:
            return False
        self._get(self._uncaptured[0])
        return True

    def find(self, needed: StepShape) -> CapturedStep[_Outputs] | None:
        """Return the cheapest captured step that has room for a step of the shape `needed`, or None."""
        holding = (shape for shape in self._by_cost if shape.holds(needed))
        best = next(holding, None)
        if best is None or best in self._captured:
            return None if best is None else self._captured[best]
        self._missed[best] += 1
        if self._missed[best] >= _MAX_MISSES:
            return self._get(best)
        return next((self._captured[shape] for shape in holding if shape in self._captured), None)

    def _get(self, shape: StepShape) -> CapturedStep[_Outputs]:
        if shape not in self._captured:
            self._captured[shape] = self._capture(shape)
            self._uncaptured.remove(shape)
        return self._captured[shape]

    @torch.inference_mode()
    def _capture(self, shape: StepShape) -> CapturedStep[_Outputs]:
        inputs = StepInputs.empty(shape, self._device)
        # It compiles kernels and loads libraries, which must not happen during the capture.
        self._forward(inputs).guesses.make(_GUESSES_OF_EACH_KIND)
        graph, outputs = self._captured_graph(lambda: self._forward(inputs))
        guesses = outputs.guesses
        if guesses is not NO_GUESSES:
            # The guesses are graphs of their own, so that a step can have any number of them. What they share with the step
            # stays allocated until all are captured.
            guesses = Guesses(*(self._captured_graph(part)[0].replay for part in guesses))
        return CapturedStep(shape, inputs, outputs.borrowed(guesses), graph)

    def _captured_graph(self, function: Callable[[], _Result]) -> tuple[torch.cuda.CUDAGraph, _Result]:
        """Capture what a function launches. Return the graph, and what the function returned."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # Other threads may use the GPU for transfers meanwhile. That is not an error.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                result = function()
            finally:
                graph.capture_end()
        return graph, result


class _BorrowedMemory:
    """The memory of a tensor, without a reference to the tensor."""

    def __init__(self, x: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "data": (x.data_ptr(), False),
            "shape": tuple(x.shape),
            "typestr": f"<i{x.element_size()}",
            "strides": None,
            "version": 3,
        }


def borrow(x: Tensor) -> Tensor:
    """Return the same values without keeping the memory allocated, so that graphs captured later can reuse it.

    The logits of all captured shapes together would take about 1 GiB.
    """
    assert x.is_contiguous()
    return torch.as_tensor(_BorrowedMemory(x), device=x.device).view(x.dtype)


def _cost(shape: StepShape) -> tuple[int, int, int]:
    """Tokens cost most, then heads. Room for attention work items costs almost nothing."""
    return shape.tokens, shape.heads, shape.tiles

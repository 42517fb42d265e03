"""StepGraphs: whole steps captured for a few shapes and replayed.

Launching a step's kernels from Python takes the host several times as long as the card needs to run them. A captured step has
room for so many tokens, pieces of attention and rows that draw; what a step has less than that is padding, which writes nowhere.
A few shapes are captured before anything is served, the others while nothing else is to be done, or when they were missed often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.engine.packed import StepInputs, StepShape

# A step that runs in a larger shape than its own so often is worth the time that capturing takes, also in the midst of others.
_MISSES = 8


@dataclass(frozen=True, slots=True)
class StepOutputs:
    logits: Tensor | None  # [heads, vocab]; None without heads
    token_ids: Tensor  # [heads]: what was drawn, for those that are to draw


@dataclass(frozen=True, slots=True)
class CapturedStep:
    shape: StepShape
    inputs: StepInputs
    outputs: StepOutputs
    graph: torch.cuda.CUDAGraph

    def run(self, packed: Tensor) -> StepOutputs:
        """The outputs are valid until the next captured step runs."""
        self.inputs.packed.copy_(packed, non_blocking=True)
        self.graph.replay()
        return self.outputs


class StepGraphs:
    def __init__(
        self,
        forward: Callable[[StepInputs], StepOutputs],
        first: Sequence[StepShape],
        rest: Sequence[StepShape],
        device: torch.device,
    ) -> None:
        """Shapes to be captured before anything is served, and others."""
        self._forward = forward
        self._device = device
        self._num_first = len(first)
        # The large before the small, which fit into their memory.
        self._left = [shape for shapes in (first, rest) for shape in sorted(shapes, key=_cost, reverse=True)]
        self._by_cost = sorted(self._left, key=_cost)
        self._captured: dict[StepShape, CapturedStep] = {}
        self._missed: Counter[StepShape] = Counter()
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()  # one memory for all: only one of them runs at a time

    def capture_first(self) -> None:
        for _ in range(self._num_first):
            self.capture_next()

    def capture_next(self) -> bool:
        """Whether there was anything left to capture."""
        if not self._left:
            return False
        self._get(self._left[0])
        return True

    def find(self, least: StepShape) -> CapturedStep | None:
        """The cheapest that was captured and has room for a step of this shape."""
        holding = (shape for shape in self._by_cost if shape.holds(least))
        best = next(holding, None)
        if best is None or best in self._captured:
            return None if best is None else self._captured[best]
        self._missed[best] += 1
        if self._missed[best] >= _MISSES:
            return self._get(best)
        return next((self._captured[shape] for shape in holding if shape in self._captured), None)

    def _get(self, shape: StepShape) -> CapturedStep:
        if shape not in self._captured:
            self._captured[shape] = self._capture(shape)
            self._left.remove(shape)
        return self._captured[shape]

    @torch.inference_mode()
    def _capture(self, shape: StepShape) -> CapturedStep:
        inputs = StepInputs.empty(shape, self._device)
        self._forward(inputs)  # kernels are compiled, and libraries loaded, before anything is captured
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # Other threads may use the card meanwhile, for transfers: that is no error.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                outputs = self._forward(inputs)
            finally:
                graph.capture_end()
        logits = None if outputs.logits is None else _borrowed(outputs.logits)
        return CapturedStep(shape, inputs, StepOutputs(logits, outputs.token_ids), graph)


class _Lent:
    """Memory of a tensor, without holding it."""

    def __init__(self, x: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "data": (x.data_ptr(), False),
            "shape": tuple(x.shape),
            "typestr": f"<i{x.element_size()}",
            "strides": None,
            "version": 3,
        }


def _borrowed(x: Tensor) -> Tensor:
    """The same values, in memory that the shapes captured later use, too: logits of all of them would be a GiB."""
    assert x.is_contiguous()
    return torch.as_tensor(_Lent(x), device=x.device).view(x.dtype)


def _cost(shape: StepShape) -> tuple[int, int, int]:
    """Tokens cost most, then heads; room for pieces next to nothing."""
    return shape.tokens, shape.heads, shape.tiles

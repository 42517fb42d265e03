"""DecodeGraphs: steps of one token a row, captured once for each of a few sizes and replayed.

Launching a step's kernels from Python takes the host several times as long as the card needs to run them. A step's inputs go
into a fixed place; a step of fewer rows than its graph is filled up with padding, which writes nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoker.engine.rows import RowTable
from stoker.kernels.paged import PagedSpans, fits
from stoker.kernels.sample_rows import sample_rows_triton
from stoker.kernels.step_inputs import step_inputs_triton
from stoker.kv.device import DeviceKv
from stoker.layers.batch import ForwardBatch
from stoker.models.contract import Model
from stoker.sched.plan import StepPlan

_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_PROMPT_TOKENS = 64  # enough of them for the way that long prompts go
_WARM_UPS = 2  # kernels are compiled, and libraries take their memory, before anything is captured


@dataclass(frozen=True, slots=True)
class _Captured:
    step: Tensor  # [3, rows]: see kernels/step_inputs.py
    logits: Tensor  # [rows, vocab]
    graph: torch.cuda.CUDAGraph
    kept: tuple[Tensor, ...]  # what the graph reads and nobody else holds


class DecodeGraphs:
    def __init__(self, model: Model, kv: DeviceKv, rows: RowTable) -> None:
        self._model = model
        self._kv = kv
        self._rows = rows
        layout = kv.layout
        is_able = fits(kv.blocks, layout.block_tokens, layout.head_dim)
        self._sizes = _sizes(rows.max_rows) if is_able else ()
        self._captured: dict[int, _Captured] = {}
        self._pool: Any = None  # one memory for all: only one of them runs at a time

    def has(self, plan: StepPlan) -> bool:
        """Whether a graph can carry out the plan's forward."""
        most = self._sizes[-1] if self._sizes else 0
        return len(plan.spans) <= most and all(span.count == 1 and span.samples for span in plan.spans)

    def warm_up(self) -> None:
        """Capture all sizes now, the largest first: the others fit into its memory. And what is not captured, prompts and the
        drawing of tokens, runs once over padding."""
        for size in reversed(self._sizes):
            self._get(size)
        if self._sizes:
            self._run_the_rest()

    def logits(self, plan: StepPlan) -> Tensor:
        """[spans, vocab], valid until the next call."""
        count = len(plan.spans)
        captured = self._get(next(size for size in self._sizes if size >= count))
        step = np.zeros(captured.step.shape, dtype=np.int64)
        step[2] = -1
        step[0, :count] = [span.row for span in plan.spans]
        step[1, :count] = plan.token_ids
        step[2, :count] = [span.start for span in plan.spans]
        captured.step.copy_(torch.from_numpy(step), non_blocking=True)
        captured.graph.replay()
        return captured.logits[:count]

    def _get(self, size: int) -> _Captured:
        if size not in self._captured:
            self._captured[size] = self._capture(size)
        return self._captured[size]

    @torch.inference_mode()
    def _capture(self, size: int) -> _Captured:
        device = self._kv.blocks.device
        step = torch.zeros(3, size, dtype=torch.int64, device=device)
        step[2] = -1
        singles = torch.arange(size, dtype=torch.int32, device=device)
        tiles = torch.empty(0, 2, dtype=torch.int32, device=device)
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._forward(step, singles, tiles)
        torch.cuda.current_stream(device).wait_stream(side)
        # Other threads may use the card meanwhile, for transfers: that is no error.
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            logits = self._forward(step, singles, tiles)
        self._pool = self._pool or graph.pool()
        return _Captured(step, logits, graph, (singles, tiles))

    @torch.inference_mode()
    def _run_the_rest(self) -> None:
        rows, device = self._rows, self._kv.blocks.device
        step = torch.zeros(3, _PROMPT_TOKENS, dtype=torch.int64, device=device)
        step[2] = -1
        tiles = torch.tensor([[0, _PROMPT_TOKENS]], dtype=torch.int32, device=device)
        logits = self._forward(step, tiles[0, :0], tiles)
        for is_filtered in (False, True):
            sample_rows_triton(logits, step[0], step[1], rows.settings, rows.last_token, is_filtered)

    def _forward(self, step: Tensor, singles: Tensor, tiles: Tensor) -> Tensor:
        kv, rows, layout = self._kv, self._rows, self._kv.layout
        sizes = (layout.num_heads, layout.block_tokens, kv.pages_per_block)
        token_ids, slots = step_inputs_triton(step, rows.last_token, rows.table, *sizes)
        where = (rows.table, step[0], step[2], singles, tiles, rows.finished)
        spans = PagedSpans(*where, kv.pages_per_block, layout.num_heads)
        return self._model.logits(self._model(ForwardBatch(token_ids, step[2], slots, spans, kv)))


def _sizes(max_rows: int) -> tuple[int, ...]:
    """Up to the first that holds all rows."""
    return tuple(size for i, size in enumerate(_SIZES) if i == 0 or _SIZES[i - 1] < max_rows)

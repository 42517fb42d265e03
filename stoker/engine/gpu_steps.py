"""CardSteps: a plan's forward and the drawing of its tokens on a card, captured (graphs.py) or, for long prompts, launched
kernel by kernel. Both take the same inputs and do the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stoker.engine.graphs import StepGraphs, StepOutputs
from stoker.engine.packed import StepData, StepInputs, StepShape
from stoker.engine.rows import RowTable
from stoker.kernels.dense import DensePlans
from stoker.kernels.paged import Cutter, PagedSpans
from stoker.kernels.sample_rows import sample_rows_triton
from stoker.kernels.step_inputs import step_inputs_triton
from stoker.kv.device.device_kv import DeviceKv
from stoker.layers.batch import ForwardBatch
from stoker.models.family import Model
from stoker.sched.plan import StepPlan

# Steps of one token a row, by rows; and steps with prompts in them, by tokens. Those that serve for most are captured first.
_ROWS_FIRST, _ROWS = (256, 64, 8, 1), (1024, 768, 512, 384, 192, 128, 96, 48, 32, 24, 16, 12, 4, 2)
_TOKENS_FIRST = (2048, 1024, 256, 64)
_TOKENS = (8192, 7168, 6144, 5120, 4096, 3584, 3072, 2560, 1792, 1536, 1280, 896, 768, 640, 512, 448, 384, 320, 192, 128, 96,
           32, 16)  # fmt: skip
_HEADS = (64, 256, 512)  # rows that such a step draws for: each costs its share of the logits
_MORE_SPANS = 32  # room for so many spans of several tokens beyond those that fill their tiles


class CardSteps:
    def __init__(self, model: Model, kv: DeviceKv, rows: RowTable, num_heads: int, mixed_tokens: int) -> None:
        self._model = model
        self._kv = kv
        self._rows = rows
        layout = kv.layout
        self._dense = DensePlans(kv.blocks, num_heads, layout.num_heads, layout.head_dim)
        self._cutter = Cutter.of(num_heads, layout.num_heads, layout.block_tokens, kv.blocks.dtype)
        first, rest = _shapes(rows.max_rows, mixed_tokens, self._cutter)
        self._graphs = StepGraphs(self._forward, first, rest, kv.blocks.device)

    def warm_up(self) -> None:
        """Compile what is needed, and capture what serves for most."""
        self._graphs.capture_first()

    def capture_next(self) -> bool:
        """When there is nothing else to do: capture a shape, or plan for a length of kernels/dense.py. Whether one was left."""
        return self._graphs.capture_next() or self._dense.plan_next()

    def capture_all(self) -> None:
        while self._graphs.capture_next():
            pass
        self._dense.plan_all()

    def run(self, plan: StepPlan, draws: bool) -> StepOutputs:
        """The logits of the spans that sample; with `draws` also a token of each, by the rows' own settings. The outputs are
        valid until the next run, and may have more rows than there are such spans."""
        data = StepData(plan, self._cutter)
        captured = self._graphs.find(data.least)
        if captured is not None:
            return captured.run(self._pack(data, captured.shape, draws))
        whole = data.take_whole(self._dense.lengths)
        shape = data.exact
        packed = self._pack(data, shape, draws).to(self._kv.blocks.device, non_blocking=True)
        return self._forward(StepInputs.of(packed, shape), whole)

    def _pack(self, data: StepData, shape: StepShape, draws: bool) -> Tensor:
        """In memory that the card reads by itself; torch gives it to nobody else until it has."""
        packed = torch.zeros(sum(shape.sizes), dtype=torch.int64, pin_memory=self._kv.blocks.is_cuda)
        data.pack(packed.numpy(), shape, draws)
        return packed

    def _forward(self, inputs: StepInputs, whole: tuple[tuple[int, int], ...] = ()) -> StepOutputs:
        kv, rows, layout = self._kv, self._rows, self._kv.layout
        token_rows, _, positions = inputs.tokens
        sizes = (layout.num_heads, layout.block_tokens, kv.pages_per_block)
        token_ids, slots = step_inputs_triton(inputs.tokens, rows.last_token, rows.table, *sizes)
        where = (rows.table, token_rows, positions, inputs.singles, inputs.tiles, whole, rows.finished)
        spans = PagedSpans(*where, kv.pages_per_block, layout.num_heads)
        hidden = self._model(ForwardBatch(token_ids, positions, slots, spans, kv))
        heads, head_rows, lengths = inputs.heads
        if not len(heads):
            return StepOutputs(None, heads)
        logits = self._model.logits(hidden[heads])
        return StepOutputs(logits, self._draw(logits, head_rows, lengths))

    def _draw(self, logits: Tensor, head_rows: Tensor, lengths: Tensor) -> Tensor:
        return sample_rows_triton(logits, head_rows, lengths, self._rows.settings, self._rows.last_token)


def most_captured(mixed_tokens: int) -> int:
    """Tokens of the largest step with prompts in it that is captured: all steps in which answers go on have room. To launch a
    larger one takes the host less time than to compute it takes the card."""
    return _least((*_TOKENS_FIRST, *_TOKENS), mixed_tokens)


def _least(sizes: Sequence[int], wanted: int) -> int:
    """The least that has room for what is wanted, or the largest of all."""
    return min((size for size in sizes if size >= wanted), default=max(sizes))


def _shapes(max_rows: int, mixed_tokens: int, cutter: Cutter) -> tuple[list[StepShape], list[StepShape]]:
    """Those to be captured first, and the others."""

    def decode(rows: int) -> StepShape:
        return StepShape(rows, cutter.most_singles(rows), 0, rows)

    def mixed(tokens: int) -> list[StepShape]:
        rows = min(max_rows, tokens)
        tiles = -(-tokens // cutter.tile_tokens) + _MORE_SPANS
        room = (tokens, cutter.most_singles(rows), cutter.most_tiles(tiles))
        return [StepShape(*room, heads) for heads in sorted({min(rows, heads) for heads in _HEADS})]

    most_rows, most_tokens = _least((*_ROWS_FIRST, *_ROWS), max_rows), most_captured(mixed_tokens)
    first = [decode(rows) for rows in _ROWS_FIRST if rows <= most_rows]
    rest = [decode(rows) for rows in _ROWS if rows <= most_rows]
    for tokens in (tokens for tokens in (*_TOKENS_FIRST, *_TOKENS) if tokens <= most_tokens):
        *fewer, most = mixed(tokens)
        (first if tokens in (most_tokens, *_TOKENS_FIRST) else rest).append(most)
        rest += fewer
    return first, rest

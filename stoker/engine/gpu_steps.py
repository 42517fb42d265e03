"""GpuSteps: runs a plan's forward pass and samples its tokens on a GPU.

A step is replayed from a CUDA graph (graphs.py). Long prefills are launched kernel by kernel. Both ways take the same
inputs and compute the same. gpu_stages.py does the same for the stages of a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from stoker.engine.device_drafter import Drafter, DraftStep
from stoker.engine.gpu_batches import Dense, StepBatches
from stoker.engine.graphs import StepGraphs, StepOutputs
from stoker.engine.packed import StepInputs, StepShape
from stoker.engine.rows import RowTable
from stoker.kernels.paged import Cutter
from stoker.kernels.sample_rows import sample_rows_triton
from stoker.kernels.verify import head_lengths_triton, verify_triton
from stoker.kv.device.device_kv import DeviceKv
from stoker.models.family import Model
from stoker.sched.draft_tape import max_heads
from stoker.sched.plan import StepPlan

# Captured sizes: rows of decode-only steps, and tokens of steps with prefill. The most useful ones are captured first.
# Small steps are hardly padded: in a model with experts, each token of padding reads the weights of experts of its own.
_ROWS_FIRST = (256, 64, 8, 1)
_ROWS = (1024, 768, 512, 384, 192, 128, 96, 48, 32, 28, 24, 20, 16, 14, 12, 10, 7, 6, 5, 4, 3, 2)
_TOKENS_FIRST = (2048, 1024, 256, 64)
_TOKENS = (8192, 7168, 6144, 5120, 4096, 3584, 3072, 2560, 1792, 1536, 1280, 896, 768, 640, 512, 448, 384, 320, 192, 128, 96,
           32, 16)  # fmt: skip
_HEADS = (64, 256, 512)  # sampling rows of a step with prefill; each costs its share of the logits
_EXTRA_SPANS = 32  # room for this many prefill spans that do not fill their last tile


class DeviceSteps(Protocol):
    """The steps of a model on one GPU, or of a stage of it."""

    def start(self, plan: StepPlan, samples: bool) -> Callable[[], StepOutputs | None]:
        """Launch the forward pass. The returned function launches what is left and returns the step's outputs, or None where
        another stage samples. Call it before the device is asked to wait for this step. See GpuSteps.run."""

    def warm_up(self) -> None:
        """Compile the kernels, and capture the shapes that most steps use."""

    def dry_run(self, *, with_rest: bool) -> None:
        """Run a step of each shape that is captured at the start, or of each shape at all, without capturing it."""

    def capture_next(self) -> bool:
        """Capture one shape, or let cuDNN plan one prompt length (kernels/dense.py). Return False if none was left."""

    def capture_all(self) -> None: ...


class GpuSteps:
    """The forward pass of one model on one GPU, with its captured graphs."""

    def __init__(
        self,
        batches: StepBatches,
        model: Model,
        kv: DeviceKv,
        rows: RowTable,
        captured_tokens: int,
        drafter: Drafter,
    ) -> None:
        self._batches, self._model, self._rows, self._drafter = batches, model, rows, drafter
        self._device = kv.device
        first, rest = step_shapes(max_heads(rows.max_rows), captured_tokens, batches.cutter)
        self._graphs = StepGraphs(self._forward, first, rest, kv.device)

    def warm_up(self) -> None:
        self._graphs.capture_first()

    def dry_run(self, *, with_rest: bool) -> None:
        self._graphs.dry_run(with_rest=with_rest)

    def capture_next(self) -> bool:
        return self._graphs.capture_next() or self._batches.plan_next()

    def capture_all(self) -> None:
        while self._graphs.capture_next():
            pass
        self._batches.plan_all()

    def start(self, plan: StepPlan, samples: bool) -> Callable[[], StepOutputs | None]:
        outputs = self.run(plan, samples)
        return lambda: outputs

    def run(self, plan: StepPlan, samples: bool) -> StepOutputs:
        """Return the logits of the heads. If `samples`, also sample by the rows' settings, and verify the drafts.

        The outputs are valid until the next run. They may have more rows than there are heads.
        """
        data = self._batches.data(plan)
        captured = self._graphs.find(data.needed)
        # Guesses after tokens that are sampled elsewhere are made there.
        num_guesses = plan.num_guesses if samples else 0
        if captured is not None:
            return captured.run(self._batches.pack(data, captured.shape, samples), num_guesses)
        dense = self._batches.take_dense(data)
        shape = data.exact
        packed = self._batches.pack(data, shape, samples).to(self._device, non_blocking=True)
        outputs = self._forward(StepInputs.of(packed, shape), dense)
        outputs.guesses.make(num_guesses)
        return outputs

    def _forward(self, inputs: StepInputs, dense: Dense = ()) -> StepOutputs:
        features, batch = self._drafter.start(), self._batches.batch(inputs, dense)
        hidden = self._model(batch, features.taps)
        step = DraftStep(batch, inputs.tokens[0], inputs.heads, features.value())
        return sample_step(self._model, self._rows, self._drafter, step, hidden[inputs.heads[0]])


def sample_step(model: Model, rows: RowTable, drafter: Drafter, step: DraftStep, hidden: Tensor) -> StepOutputs:
    """Sample, verify the drafts and take the step into the draft model. `hidden` are the states of the heads, after the last
    layer."""
    heads, token_ids, positions = step.heads, step.batch.token_ids, step.batch.positions
    if not heads.shape[1]:
        guesses = drafter.draft(step, heads[0], heads[0])
        return StepOutputs(None, heads[0], heads[0], token_ids, positions, step, guesses)
    logits = model.logits(hidden)
    sampled = sample_rows_triton(logits, heads[1], head_lengths_triton(heads, positions), rows.settings)
    counts = verify_triton(heads, token_ids, positions, sampled, rows.tokens)
    guesses = drafter.draft(step, sampled, counts)
    return StepOutputs(logits, sampled, counts, token_ids, positions, step, guesses)


def max_captured_tokens(needed: int) -> int:
    """Return the tokens of the largest captured step with prefill, if steps of up to `needed` tokens are captured.

    A larger step is not captured: launching it takes the host less time than computing it takes the GPU.
    """
    return _smallest_fitting((*_TOKENS_FIRST, *_TOKENS), needed)


def _smallest_fitting(sizes: Sequence[int], needed: int) -> int:
    """Return the smallest size that is at least `needed`, or the largest of all."""
    return min((size for size in sizes if size >= needed), default=max(sizes))


def step_shapes(max_rows: int, captured_tokens: int, cutter: Cutter) -> tuple[list[StepShape], list[StepShape]]:
    """Return the shapes to capture before serving, and those to capture later.

    A shape for decoding also holds steps that verify drafts, with fewer rows than tokens.
    """

    def decode(rows: int) -> StepShape:
        return StepShape(rows, cutter.max_singles(rows), 0, rows)

    def mixed(tokens: int) -> list[StepShape]:
        rows = min(max_rows, tokens)
        tiles = -(-tokens // cutter.tile_tokens) + _EXTRA_SPANS
        room = (tokens, cutter.max_singles(rows), cutter.max_tiles(tiles))
        return [StepShape(*room, heads) for heads in sorted({min(rows, heads) for heads in _HEADS})]

    largest_rows = _smallest_fitting((*_ROWS_FIRST, *_ROWS), max_rows)
    largest_tokens = max_captured_tokens(captured_tokens)
    first = [decode(rows) for rows in _ROWS_FIRST if rows <= largest_rows]
    rest = [decode(rows) for rows in _ROWS if rows <= largest_rows]
    for tokens in (tokens for tokens in (*_TOKENS_FIRST, *_TOKENS) if tokens <= largest_tokens):
        *fewer_heads, all_heads = mixed(tokens)
        (first if tokens in (largest_tokens, *_TOKENS_FIRST) else rest).append(all_heads)
        rest += fewer_heads
    return first, rest

"""GpuSteps: runs a plan's forward pass and samples its tokens on a GPU.

A step is replayed from a CUDA graph (graphs.py). Long prefills are launched kernel by kernel. Both ways take the same
inputs and compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stoker.engine.device_drafter import Drafter, DraftStep, NoDrafter
from stoker.engine.graphs import StepGraphs, StepOutputs
from stoker.engine.packed import StepData, StepInputs, StepShape
from stoker.engine.rows import RowTable
from stoker.kernels import mla
from stoker.kernels.dense import DensePlans
from stoker.kernels.exact_pieces import ExactCutter
from stoker.kernels.paged import Cutter, PagedSpans, fits, new_counters
from stoker.kernels.sample_rows import sample_rows_triton
from stoker.kernels.step_inputs import step_inputs_triton
from stoker.kernels.verify import head_lengths_triton, verify_triton
from stoker.kv.blocks.layout import KvGroup
from stoker.kv.device.device_kv import DeviceKv, GroupKv
from stoker.layers.batch import ForwardBatch, GroupInputs
from stoker.models.family import Model
from stoker.sched.draft_tape import max_heads
from stoker.sched.plan import StepPlan

# Captured sizes: rows of decode-only steps, and tokens of steps with prefill. The most useful ones are captured first.
_ROWS_FIRST, _ROWS = (256, 64, 8, 1), (1024, 768, 512, 384, 192, 128, 96, 48, 32, 24, 16, 12, 4, 2)
_TOKENS_FIRST = (2048, 1024, 256, 64)
_TOKENS = (8192, 7168, 6144, 5120, 4096, 3584, 3072, 2560, 1792, 1536, 1280, 896, 768, 640, 512, 448, 384, 320, 192, 128, 96,
           32, 16)  # fmt: skip
_HEADS = (64, 256, 512)  # sampling rows of a step with prefill; each costs its share of the logits
_EXTRA_SPANS = 32  # room for this many prefill spans that do not fill their last tile


def can_page(kv: DeviceKv) -> bool:
    """Return True if the GPU's kernels support this device and the shapes of all KV groups."""
    return all(_has_kernels(kv.like, group) for group in kv.all_groups)


def _has_kernels(like: Tensor, group: GroupKv) -> bool:
    if group.kind == "latent":
        return mla.fits(like, group.page_tokens, group.width)
    return fits(like, group.block_tokens, group.width)


def cut_heads(num_heads: int, group: KvGroup | GroupKv) -> tuple[int, int]:
    """Return the query heads and the KV heads by which the attention of a group is cut into pieces."""
    return mla.cut_heads(num_heads) if group.kind == "latent" else (num_heads, group.num_heads)


class GpuSteps:
    """The forward pass of one model on one GPU, with its captured graphs."""

    def __init__(
        self,
        model: Model,
        kv: DeviceKv,
        rows: RowTable,
        num_heads: int,
        captured_tokens: int,
        exact: bool = False,
        verifies: bool = False,
        drafter: Drafter | None = None,
        draft_heads: int = 0,
    ) -> None:
        """`num_heads` and `draft_heads` are the query heads of the model and of the draft model. `exact`: a token's logits
        depend only on the tokens before it (docs/engine.md, "Numerics"). `verifies`: plans may have drafts."""
        self._model = model
        self._kv = kv
        self._rows = rows
        self._drafter = drafter or NoDrafter()
        # With a split context, a rank computes the heads of all ranks that hold a part of it.
        queries = [*(num_heads * group.split.of for group in kv.groups), draft_heads]
        groups = list(zip(queries, kv.all_groups, strict=False))
        # The expanded form of latent attention (kernels/mla.py) does not go through cuDNN.
        shapes = [(heads, group.num_heads, group.width) for heads, group in groups if group.kind != "latent"]
        most_dense = 0 if model.has_sinks else min((group.extent for group in kv.groups if group.extent), default=None)
        self._dense = DensePlans(kv.like, shapes, most_dense)
        sizes = ([cut_heads(*group) for group in groups], kv.layout.block_tokens, kv.like.dtype)
        self._cutter, self._finished = Cutter.of(*sizes, verifies), rows.finished
        if exact:
            self._cutter = cutter = ExactCutter.for_model(*sizes, rows.tables[0].shape[1], kv.sets[0].num_blocks)
            self._finished = new_counters(kv.device, cutter.max_groups(rows.max_rows) * cutter.num_kv_heads)
        # cuDNN's attention rounds differently from the kernel that computes the other tokens of a prompt.
        self._uses_dense = not exact
        first, rest = _shapes(max_heads(rows.max_rows), captured_tokens, self._cutter)
        self._graphs = StepGraphs(self._forward, first, rest, kv.device)

    def warm_up(self) -> None:
        """Compile the kernels, and capture the shapes that most steps use."""
        self._graphs.capture_first()

    def dry_run(self, *, with_rest: bool) -> None:
        """Run a step of each shape that is captured at the start, or of each shape at all, without capturing it."""
        self._graphs.dry_run(with_rest=with_rest)

    def capture_next(self) -> bool:
        """Capture one shape, or let cuDNN plan one prompt length (kernels/dense.py). Return False if none was left."""
        return self._graphs.capture_next() or (self._uses_dense and self._dense.plan_next())

    def capture_all(self) -> None:
        while self._graphs.capture_next():
            pass
        if self._uses_dense:
            self._dense.plan_all()

    def run(self, plan: StepPlan, samples: bool) -> StepOutputs:
        """Return the logits of the heads. If `samples`, also sample by the rows' settings, and verify the drafts.

        The outputs are valid until the next run. They may have more rows than there are heads.
        """
        data = StepData(plan, self._cutter)
        captured = self._graphs.find(data.needed)
        # Guesses after tokens that are sampled elsewhere are made there.
        num_guesses = plan.num_guesses if samples else 0
        if captured is not None:
            return captured.run(self._pack(data, captured.shape, samples), num_guesses)
        dense = data.take_dense_prefixes(self._dense.lengths) if self._uses_dense else ()
        shape = data.exact
        packed = self._pack(data, shape, samples).to(self._kv.device, non_blocking=True)
        outputs = self._forward(StepInputs.of(packed, shape), dense)
        outputs.guesses.make(num_guesses)
        return outputs

    def _pack(self, data: StepData, shape: StepShape, samples: bool) -> Tensor:
        """Pack the inputs into pinned memory. torch does not reuse it before the GPU has read it."""
        packed = torch.zeros(sum(shape.sizes), dtype=torch.int64, pin_memory=self._kv.like.is_cuda)
        data.pack(packed.numpy(), shape, samples)
        return packed

    def _forward(self, inputs: StepInputs, dense: tuple[tuple[int, int], ...] = ()) -> StepOutputs:
        rows, groups = self._rows, []
        for group in self._kv.all_groups:
            sizes = (group.num_heads, group.block_tokens, group.pages_per_block)
            table = rows.tables[group.kv_set]
            token_ids, positions, slots = step_inputs_triton(inputs.tokens, rows.tokens, table, *sizes)
            where = (table, inputs.tokens[0], positions, inputs.singles, inputs.tiles, dense, self._finished)
            spans = PagedSpans(*where, group.pages_per_block, group.num_heads, self._cutter.form, group.reach)
            groups.append(GroupInputs(group.split.slots(slots, group.block_tokens), spans, group))
        num_groups, features = len(self._kv.groups), self._drafter.start()
        batch = ForwardBatch(token_ids, positions, tuple(groups[:num_groups]), *groups[num_groups:])
        hidden = self._model(batch, features.taps)
        heads = inputs.heads
        step = DraftStep(batch, inputs.tokens[0], heads, features.value())
        if not heads.shape[1]:
            guesses = self._drafter.draft(step, heads[0], heads[0])
            return StepOutputs(None, heads[0], heads[0], token_ids, positions, step, guesses)
        logits = self._model.logits(hidden[heads[0]])
        sampled = sample_rows_triton(logits, heads[1], head_lengths_triton(heads, positions), rows.settings)
        counts = verify_triton(heads, token_ids, positions, sampled, rows.tokens)
        guesses = self._drafter.draft(step, sampled, counts)
        return StepOutputs(logits, sampled, counts, token_ids, positions, step, guesses)


def max_captured_tokens(needed: int) -> int:
    """Return the tokens of the largest captured step with prefill, if steps of up to `needed` tokens are captured.

    A larger step is not captured: launching it takes the host less time than computing it takes the GPU.
    """
    return _smallest_fitting((*_TOKENS_FIRST, *_TOKENS), needed)


def _smallest_fitting(sizes: Sequence[int], needed: int) -> int:
    """Return the smallest size that is at least `needed`, or the largest of all."""
    return min((size for size in sizes if size >= needed), default=max(sizes))


def _shapes(max_rows: int, captured_tokens: int, cutter: Cutter) -> tuple[list[StepShape], list[StepShape]]:
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

"""StepBatches: what the GPU steps of a model share. It packs plans, and makes the forward batches from packed inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.engine.packed import StepData, StepInputs, StepShape
from stoker.engine.rows import RowTable
from stoker.kernels import mla
from stoker.kernels.dense import DensePlans
from stoker.kernels.exact_pieces import ExactCutter
from stoker.kernels.paged import Cutter, PagedSpans, fits, new_counters
from stoker.kernels.step_inputs import step_inputs_triton
from stoker.kv.blocks.layout import KvGroup
from stoker.kv.device.device_kv import DeviceKv, GroupKv
from stoker.layers.batch import ForwardBatch, GroupInputs
from stoker.models.family import Model
from stoker.sched.plan import StepPlan

Dense = tuple[tuple[int, int], ...]


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


class StepBatches:
    """The inputs of the steps of one model on one GPU."""

    def __init__(
        self,
        model: Model,
        kv: DeviceKv,
        rows: RowTable,
        num_heads: int,
        exact: bool = False,
        verifies: bool = False,
        draft_heads: int = 0,
    ) -> None:
        """`num_heads` and `draft_heads` are the query heads of the model and of the draft model. `exact`: a token's logits
        depend only on the tokens before it (docs/engine.md, "Numerics"). `verifies`: plans may have drafts."""
        self._kv, self._rows = kv, rows
        # With a split context, a rank computes the heads of all ranks that hold a part of it.
        queries = [*(num_heads * group.split.of for group in kv.groups), draft_heads]
        groups = list(zip(queries, kv.all_groups, strict=False))
        # The expanded form of latent attention (kernels/mla.py) does not go through cuDNN.
        shapes = [(heads, group.num_heads, group.width) for heads, group in groups if group.kind != "latent"]
        most_dense = 0 if model.has_sinks else min((group.extent for group in kv.groups if group.extent), default=None)
        self._dense = DensePlans(kv.like, shapes, most_dense)
        sizes = ([cut_heads(*group) for group in groups], kv.layout.block_tokens, kv.like.dtype)
        self.cutter, self._finished = Cutter.of(*sizes, verifies), rows.finished
        if exact:
            self.cutter = cutter = ExactCutter.for_model(*sizes, rows.tables[0].shape[1], kv.sets[0].num_blocks)
            self._finished = new_counters(kv.device, cutter.max_groups(rows.max_rows) * cutter.num_kv_heads)
        # cuDNN's attention rounds differently from the kernel that computes the other tokens of a prompt.
        self._uses_dense = not exact

    def plan_next(self) -> bool:
        """Let cuDNN plan one prompt length (kernels/dense.py). Return False if none was left."""
        return self._uses_dense and self._dense.plan_next()

    def plan_all(self) -> None:
        if self._uses_dense:
            self._dense.plan_all()

    def data(self, plan: StepPlan) -> StepData:
        return StepData(plan, self.cutter)

    def take_dense(self, data: StepData) -> Dense:
        """Take what cuDNN computes out of a step that is not captured."""
        return data.take_dense_prefixes(self._dense.lengths) if self._uses_dense else ()

    def pack(self, data: StepData, shape: StepShape, samples: bool) -> Tensor:
        """Pack the inputs into pinned memory. torch does not reuse it before the GPU has read it."""
        packed = torch.zeros(sum(shape.sizes), dtype=torch.int64, pin_memory=self._kv.like.is_cuda)
        data.pack(packed.numpy(), shape, samples)
        return packed

    def batch(self, inputs: StepInputs, dense: Dense = ()) -> ForwardBatch:
        """Return the batch of the model, and of the draft model if there is one."""
        found = [self._group(inputs, group, dense) for group in self._kv.all_groups]
        token_ids, positions, _ = found[0]
        groups, num_groups = [inputs for _, _, inputs in found], len(self._kv.groups)
        return ForwardBatch(token_ids, positions, tuple(groups[:num_groups]), *groups[num_groups:])

    def draft_batch(self, inputs: StepInputs, dense: Dense = ()) -> ForwardBatch:
        """Return the batch of the draft model alone. The ids and positions of all tokens are in the inputs."""
        draft = None if self._kv.draft is None else self._group(inputs, self._kv.draft, dense)[2]
        return ForwardBatch(inputs.tokens[1], inputs.tokens[2], (), draft)

    def _group(self, inputs: StepInputs, group: GroupKv, dense: Dense) -> tuple[Tensor, Tensor, GroupInputs]:
        rows, sizes = self._rows, (group.num_heads, group.block_tokens, group.pages_per_block)
        table = rows.tables[group.kv_set]
        token_ids, positions, slots = step_inputs_triton(inputs.tokens, rows.tokens, table, *sizes)
        where = (table, inputs.tokens[0], positions, inputs.singles, inputs.tiles, dense, self._finished)
        spans = PagedSpans(*where, group.pages_per_block, group.num_heads, self.cutter.form, group.reach)
        return token_ids, positions, GroupInputs(group.split.slots(slots, group.block_tokens), spans, group)

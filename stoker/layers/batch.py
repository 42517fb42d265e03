"""ForwardBatch: the device tensors of one forward pass, an argument of every forward()."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stoker.kernels.attention import SpanGroup
from stoker.kernels.attention_grid import GridSpans
from stoker.kernels.attention_rows import RowGroup
from stoker.kernels.mla_split import SplitSpans
from stoker.kernels.paged import PagedSpans
from stoker.kv.device.device_kv import GroupKv


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """The places at which the layers of one KV group read and write their KV."""

    # [tokens * kv_heads], where each token's K is in the group's layer 0; V and the other layers are at fixed offsets
    slots: Tensor
    # which tokens attend to which: for the reference, for 8-bit weights on a CPU, for the GPU kernels, or for the reference if
    # ranks split the context
    spans: list[SpanGroup | RowGroup] | GridSpans | PagedSpans | SplitSpans
    kv: GroupKv


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The inputs of a forward pass."""

    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens], -1 is padding
    groups: tuple[GroupInputs, ...]  # one for each KV group of the model, in the order of ModelFamily.kv_groups
    draft: GroupInputs | None = None  # of the draft model's KV group

"""ForwardBatch: the device tensors of one forward pass, an argument of every forward()."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stoker.kernels.attention import SpanGroup
from stoker.kernels.attention_grid import GridSpans
from stoker.kernels.attention_rows import RowGroup
from stoker.kernels.paged import PagedSpans
from stoker.kv.device.device_kv import DeviceKv


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The inputs of a forward pass."""

    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens], -1 is padding
    # [tokens * kv_heads], where each token's K is in layer 0; V and the other layers are at fixed offsets
    slots: Tensor
    # which tokens attend to which: for the reference, for 8-bit weights on a CPU, or for the GPU kernels
    spans: list[SpanGroup | RowGroup] | GridSpans | PagedSpans
    kv: DeviceKv

"""ForwardBatch: the device tensors of one forward; an argument of every forward()."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stoker.kernels.attention import SpanGroup
from stoker.kernels.attention_rows import RowGroup
from stoker.kernels.paged import PagedSpans
from stoker.kv.device.device_kv import DeviceKv


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens], -1 is padding
    slots: Tensor  # [tokens * kv_heads] where each token's K lies in layer 0; V and the other layers lie at fixed distances
    spans: list[SpanGroup | RowGroup] | PagedSpans  # what attends to what: for the reference, or for the card's kernels
    kv: DeviceKv

"""Linear layers, fused with the norm before and the addition after them. Call `pack` once after loading; it may drop
the parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stoker.kernels.cpu_int8 import Int8Kernel, Int8Weight, rotate_outputs
from stoker.kernels.linear import (
    CpuRowsWeight,
    PackedWeight,
    Weight,
    add_gated_linear,
    add_linear,
    linear,
    norm_linear,
    pack_weight,
)
from stoker.layers.embedding import Embedding
from stoker.layers.norm import RMSNorm
from stoker.layers.quant import PLAIN, Int8Packing, Stored, StoredWeight


class Linear(StoredWeight):
    """A linear layer. `parts` is the number of outputs, or the outputs of each projection that is fused into this
    matmul. `out_blocks` and `rotated_block` are for 8-bit weights: see Int8Packing. `partial`: another rank adds the
    total of `add_to` and `add_gated_to`, so that they return this rank's part of the sum alone."""

    def __init__(
        self,
        in_features: int,
        parts: int | Sequence[int],
        bias: bool = False,
        stored: Stored = PLAIN,
        out_blocks: Sequence[int] | None = None,
        rotated_block: int | None = None,
        partial: bool = False,
    ) -> None:
        super().__init__(in_features, (parts,) if isinstance(parts, int) else parts, stored)
        self.bias = nn.Parameter(torch.empty(self.out_features), requires_grad=False) if bias else None
        self._out_blocks, self._rotated_block = tuple(out_blocks or (1,) * len(self._parts)), rotated_block
        self.is_partial = partial
        self._packed: Weight | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.out_features, self.in_features

    def reorder(self, rows: Sequence[int]) -> None:
        """Reorder the first outputs, once after loading and before `pack`: output i becomes what `rows[i]` was."""
        self.reorder_rows(rows)
        if self.bias is not None:
            self.bias.data[: len(rows)] = self.bias.data[list(rows)]

    def pack(self, int8: Int8Kernel | None = None, exact: bool = False) -> None:
        packing = None if int8 is None else Int8Packing(int8, self._out_blocks, self._rotated_block)
        ready = self.ready(packing)
        if isinstance(ready, Int8Weight) and self.bias is not None:
            biases = zip(self.bias.split(self._parts), self._out_blocks, strict=True)
            self.bias.data = torch.cat([rotate_outputs(part[:, None], block)[:, 0] for part, block in biases])
        self._packed = packed = pack_weight(ready, exact)
        if isinstance(packed.weight if isinstance(packed, CpuRowsWeight) else packed, PackedWeight):
            self.drop()

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return norm_linear(x, norm.norm, self._ready, self.bias)

    def plain(self, x: Tensor) -> Tensor:
        """Return linear(x), without a norm."""
        return linear(x, self._ready, self.bias)

    def add_to(self, total: Tensor, x: Tensor) -> Tensor:
        """Return total + linear(x). The memory of `total` is reused."""
        return add_linear(total.zero_() if self.is_partial else total, x, self._ready, self.bias)

    def add_gated_to(self, total: Tensor, gate_up: Tensor) -> Tensor:
        """Like `add_to`, for x = the second half of gate_up, gated by its first half."""
        return add_gated_linear(total.zero_() if self.is_partial else total, gate_up, self._ready, self.bias)

    @property
    def int8_weight(self) -> Int8Weight | None:
        """The weight, if it is in 8 bits."""
        return self._packed if isinstance(self._packed, Int8Weight) else None

    @property
    def _ready(self) -> Weight:
        assert self._packed is not None, "pack() comes first"
        return self._packed


class TiedLinear(nn.Module):
    """A head that shares the embedding's weight. The embedding needs the weight unpacked for look-ups."""

    def __init__(self, tied: Embedding) -> None:
        super().__init__()
        self._tied = [tied]  # in a list, so that the module does not register the embedding's parameters as its own
        self._packed: Weight | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self._tied[0].out_features, self._tied[0].in_features

    def pack(self, int8: Int8Kernel | None = None, exact: bool = False) -> None:
        """Pack the weight. The embedding is packed first."""
        ready = self._tied[0].as_matmul(int8)
        self._packed = pack_weight(ready, exact)

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        assert self._packed is not None, "pack() comes first"
        return norm_linear(x, norm.norm, self._packed)

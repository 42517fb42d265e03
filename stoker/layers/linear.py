"""Linear layers, with what stands before and after them. `pack` once after loading; then the parameter itself may be gone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stoker.kernels.linear import PackedWeight, add_gated_linear, add_linear, norm_linear, pack_weight
from stoker.layers.norm import RMSNorm


class Linear(nn.Module):
    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self._packed: Tensor | PackedWeight | None = None

    def pack(self) -> None:
        """The packed copy takes the parameter's place, so that the weight is held once."""
        self._packed = pack_weight(self.weight.data)
        if isinstance(self._packed, PackedWeight):
            self.weight.data = torch.empty(0)

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return norm_linear(x, norm.norm, self._ready, self.bias)

    def add_to(self, total: Tensor, x: Tensor) -> Tensor:
        """total + the product of x; `total` is spent."""
        return add_linear(total, x, self._ready, self.bias)

    def add_gated_to(self, total: Tensor, gate_up: Tensor) -> Tensor:
        """The same for x = gate_up's second half, gated by its first."""
        return add_gated_linear(total, gate_up, self._ready, self.bias)

    @property
    def _ready(self) -> Tensor | PackedWeight:
        return self.weight if self._packed is None else self._packed


class TiedLinear(nn.Module):
    """A head that shares the embedding's weight, which is needed as it is for look-ups."""

    def __init__(self, tied: nn.Parameter) -> None:
        super().__init__()
        self._tied = [tied]  # in a list: it is the embedding's parameter, not ours
        self._packed: Tensor | PackedWeight | None = None

    def pack(self) -> None:
        self._packed = pack_weight(self._tied[0].data)

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return norm_linear(x, norm.norm, self._tied[0] if self._packed is None else self._packed)

"""Linear layers, with what stands before and after them. `pack` once after loading; then the parameters themselves may be gone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stoker.kernels.linear import Weight, add_gated_linear, add_linear, norm_linear, pack_weight
from stoker.layers.norm import RMSNorm
from stoker.layers.quant import PLAIN, Stored, stacked


class Linear(nn.Module):
    """`parts`: the outputs, or those of each of several products that are one here. Its parameters have the checkpoint's names."""

    def __init__(
        self, in_features: int, parts: int | Sequence[int], bias: bool = False, stored: Stored = PLAIN
    ) -> None:
        super().__init__()
        self._parts = (parts,) if isinstance(parts, int) else tuple(parts)
        self.in_features, self.out_features = in_features, sum(self._parts)
        self._stored, self._dtype = stored, torch.get_default_dtype()
        for name, tensor in stacked(stored, self._parts, in_features).items():
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self._names = list(self._parameters)
        self.bias = nn.Parameter(torch.empty(self.out_features), requires_grad=False) if bias else None
        self._packed: Weight | None = None

    def pack(self) -> None:
        """What is made of the parameters takes their place, so that the weight is held once."""
        tensors = {name: self.get_parameter(name).data for name in self._names}
        self._packed = self._stored.ready(tensors, self._parts, self.in_features, self._dtype)
        if self._packed is not tensors.get("weight"):
            for name in self._names:
                self.get_parameter(name).data = torch.empty(0)

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return norm_linear(x, norm.norm, self._ready, self.bias)

    def add_to(self, total: Tensor, x: Tensor) -> Tensor:
        """total + the product of x; `total` is spent."""
        return add_linear(total, x, self._ready, self.bias)

    def add_gated_to(self, total: Tensor, gate_up: Tensor) -> Tensor:
        """The same for x = gate_up's second half, gated by its first."""
        return add_gated_linear(total, gate_up, self._ready, self.bias)

    @property
    def _ready(self) -> Weight:
        assert self._packed is not None, "pack() comes first"
        return self._packed


class TiedLinear(nn.Module):
    """A head that shares the embedding's weight, which is needed as it is for look-ups."""

    def __init__(self, tied: nn.Parameter) -> None:
        super().__init__()
        self._tied = [tied]  # in a list: it is the embedding's parameter, not ours
        self._packed: Weight | None = None

    def pack(self) -> None:
        self._packed = pack_weight(self._tied[0].data)

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return norm_linear(x, norm.norm, self._tied[0] if self._packed is None else self._packed)

"""Gated MLP. The gate and up projections are one matmul."""

from __future__ import annotations

from torch import Tensor, nn

from stoker.layers.linear import Linear
from stoker.layers.norm import RMSNorm
from stoker.layers.quant import PLAIN, Stored


class GatedMlp(nn.Module):
    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, gate_up: Stored = PLAIN, down: Stored = PLAIN
    ) -> None:
        super().__init__()
        self.gate_up = Linear(hidden_size, (intermediate_size, intermediate_size), bias, gate_up)
        self.down = Linear(intermediate_size, hidden_size, bias, down)

    @property
    def width(self) -> int:
        """Values held per token at the same time: gate and up, and their elementwise product."""
        return self.gate_up.out_features + self.down.in_features

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Return x + mlp(norm(x)). The memory of x is reused."""
        return self.down.add_gated_to(x, self.gate_up(x, norm))

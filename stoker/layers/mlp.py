"""Gated MLP, gate and up as one product."""

from __future__ import annotations

from torch import Tensor, nn

from stoker.layers.linear import Linear
from stoker.layers.norm import RMSNorm


class GatedMlp(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, bias)
        self.down = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """x + the MLP of the normed x; x is spent."""
        return self.down.add_gated_to(x, self.gate_up(x, norm))

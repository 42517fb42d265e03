"""Gated MLP. The gate and up projections are one matmul."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from stoker.layers.linear import Linear
from stoker.layers.norm import RMSNorm
from stoker.layers.quant import PLAIN, Stored, StoredAs
from stoker.parallel.shard import Shard


@dataclass(frozen=True, slots=True)
class MlpConfig:
    intermediate_size: int
    bias: bool = False
    partial: bool = False  # another rank adds the residual and the bias of the output

    def build(self, hidden_size: int, stored: StoredAs, name: str) -> GatedMlp:
        """Build the MLP of the layer `name`."""
        sizes = (hidden_size, self.intermediate_size, self.bias)
        return GatedMlp(*sizes, stored(f"{name}.gate_up"), stored(f"{name}.down"), self.partial)

    def sharded(self, shard: Shard) -> MlpConfig:
        """Return the MLP of a rank: a part of the inner width."""
        width = shard.piece.size_of(self.intermediate_size, f"tp={shard.tp}: intermediate_size")
        return replace(self, intermediate_size=width, partial=shard.is_partial)

    def active_weights(self, hidden_size: int) -> int:
        """Number of weights in the matmuls that one token passes through."""
        return 3 * hidden_size * self.intermediate_size


class GatedMlp(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        gate_up: Stored = PLAIN,
        down: Stored = PLAIN,
        partial: bool = False,
    ) -> None:
        super().__init__()
        self.gate_up = Linear(hidden_size, (intermediate_size, intermediate_size), bias, gate_up)
        self.down = Linear(intermediate_size, hidden_size, bias and not partial, down, partial=partial)

    @property
    def width(self) -> int:
        """Values held per token at the same time: gate and up, and their elementwise product."""
        return self.gate_up.out_features + self.down.in_features

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Return x + mlp(norm(x)). The memory of x is reused."""
        return self.down.add_gated_to(x, self.gate_up(x, norm))

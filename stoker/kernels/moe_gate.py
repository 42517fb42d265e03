# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""What is between the two matmuls of an expert: the bias of gate and up, and the gated activation.

gate_up [tokens, 2 * width], gate then up   ->  [tokens, width]

Most models have no bias and gate with SiLU: gate * sigmoid(gate) * up. With a clamp, both are limited first, and the
result is gate * sigmoid(alpha * gate) * (up + 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.kernels.activation import silu_mul_ref
from stoker.kernels.dispatch import tl, triton


@dataclass(frozen=True, slots=True)
class Clamp:
    """gate is at most `limit`, and up is between -limit and limit."""

    limit: float
    alpha: float


@dataclass(frozen=True, slots=True)
class Gate:
    clamp: Clamp | None = None  # None: SiLU
    bias: Tensor | None = None  # [experts, 2 * width], of gate, then of up

    @property
    def constants(self) -> dict[str, float | bool]:
        """The arguments of the kernels that describe the gate."""
        clamp = self.clamp or Clamp(0.0, 1.0)
        return {"GATE_BIAS": self.bias is not None, "LIMIT": clamp.limit, "ALPHA": clamp.alpha}

    def of_expert(self, gate_up: Tensor, expert: int) -> Tensor:
        """Return the input of the down projection; the reference."""
        if self.bias is not None:
            gate_up = gate_up + self.bias[expert]
        if self.clamp is None:
            return silu_mul_ref(gate_up)
        limit, alpha = self.clamp.limit, self.clamp.alpha
        wide = gate_up if gate_up.dtype == torch.float64 else gate_up.float()
        gate, up = wide.chunk(2, -1)
        gate = gate.clamp(max=limit)
        divisor = (gate * -alpha).exp_().add_(1)
        return (gate / divisor * (up.clamp(-limit, limit) + 1)).to(gate_up.dtype)


SILU = Gate()


@triton.jit
def gated(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Return the input of the down projection, in float32."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
        return gate / (1 + tl.exp(gate * -ALPHA)) * up
    else:
        return gate / (1 + tl.exp(-gate)) * up


@triton.jit
def gate_biases(bias, expert, out, WIDTH: tl.constexpr):
    """Return the biases of gate and of up for some outputs of an expert; 0 beyond the last."""
    mine = bias + expert.to(tl.int64) * (2 * WIDTH) + out
    gate = tl.load(mine, mask=out < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(mine + WIDTH, mask=out < WIDTH, other=0.0).to(tl.float32)
    return gate, up

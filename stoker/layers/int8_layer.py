"""A decoder layer with 8-bit weights on a CPU, as one function.

For one token, calling modules and looking up their parts takes as long as the operators. So everything that stays the
same between steps is looked up once.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stoker.kernels.activation import silu_mul
from stoker.kernels.attention_grid import GridSpans, grid_attention, grid_rope_write
from stoker.kernels.cpu_int8 import Int8Weight, NormGrid, int8_linear, int8_norm_linear
from stoker.kernels.rope_write import HeadNorms
from stoker.layers.batch import GroupInputs
from stoker.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Int8Matmul:
    weight: Int8Weight
    bias: Tensor | None
    is_partial: bool = False  # another rank adds the total of `add_to`

    def of_normed(self, x: Tensor, norm: NormGrid) -> Tensor:
        """Return the matmul of norm(x)."""
        found = int8_norm_linear(x, norm, self.weight)
        return found if self.bias is None else found.add_(self.bias)

    def add_to(self, total: Tensor, x: Tensor) -> Tensor:
        """Return total + matmul(x). The memory of `total` is reused."""
        if self.is_partial:
            total.zero_()
        total.addcmul_(*int8_linear(x, self.weight))
        return total if self.bias is None else total.add_(self.bias)


@dataclass(frozen=True, slots=True)
class Int8Layer:
    attention_norm: NormGrid
    qkv: Int8Matmul
    head_norms: HeadNorms | None
    out: Int8Matmul
    mlp_norm: NormGrid
    gate_up: Int8Matmul
    down: Int8Matmul
    num_kv_heads: int
    head_dim: int
    mesh: Mesh

    def run(self, x: Tensor, where: GroupInputs, spans: GridSpans, layer: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the residual stream after the layer. The memory of x is reused."""
        num_tokens, num_kv_heads = len(x), self.num_kv_heads
        heads = self.qkv.of_normed(x, self.attention_norm).view(num_tokens, -1, self.head_dim)
        slots = where.kv.slots(layer)
        q = grid_rope_write(heads, cos, sin, slots, where.slots, spans, num_kv_heads, self.head_norms)
        attended = grid_attention(q, slots, spans, num_kv_heads, self.head_dim**-0.5)
        x = self.mesh.combine(self.out.add_to(x, attended.view(num_tokens, -1)))
        return self.mesh.combine(self.down.add_to(x, silu_mul(self.gate_up.of_normed(x, self.mlp_norm))))

"""Grouped-query attention over the paged KV cache. The q, k and v projections are one matmul."""

from __future__ import annotations

from torch import Tensor, nn

from stoker.kernels.attention import paged_attention
from stoker.kernels.attention_grid import GridSpans, grid_attention, grid_rope_write
from stoker.kernels.dispatch import is_power_of_2
from stoker.kernels.rope_write import HeadNorms, rope_write
from stoker.layers.batch import ForwardBatch
from stoker.layers.linear import Linear
from stoker.layers.norm import RMSNorm
from stoker.layers.quant import PLAIN, Stored


class Attention(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        qk_norm_eps: float | None,
        qkv: Stored = PLAIN,
        out: Stored = PLAIN,
    ) -> None:
        super().__init__()
        self.num_heads, self._num_kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        kv_size = num_kv_heads * head_dim
        # With 8-bit weights, the values are rotated, and so is the output of attention, which is linear in them.
        block = head_dim if is_power_of_2(head_dim) else None
        parts = (num_heads * head_dim, kv_size, kv_size)
        self.qkv = Linear(hidden_size, parts, bias, qkv, out_blocks=(1, 1, block or 1))
        self.out = Linear(num_heads * head_dim, hidden_size, bias, out, rotated_block=block)
        self._qk_norm_eps = qk_norm_eps
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, qk_norm_eps)
            self.k_norm = RMSNorm(head_dim, qk_norm_eps)

    @property
    def width(self) -> int:
        """Values held per token at the same time: q, k and v, the rotated query, and the attention output."""
        return self.qkv.out_features + 2 * self.out.in_features

    def forward(self, x: Tensor, norm: RMSNorm, batch: ForwardBatch, layer: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Return x + attention(norm(x)). The memory of x is reused."""
        heads = self.qkv(x, norm).view(len(x), -1, self._head_dim)
        norms = None
        if self._qk_norm_eps is not None:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self._qk_norm_eps)
        pages, spans, scale = batch.kv.pages(layer), batch.spans, self._head_dim**-0.5
        if isinstance(spans, GridSpans):
            q = grid_rope_write(heads, cos, sin, pages, batch.slots, spans, self._num_kv_heads, norms)
            attended = grid_attention(q, pages, spans, self._num_kv_heads, scale)
            return self.out.add_to(x, attended.view(len(x), -1))
        parts = rope_write(heads, cos, sin, batch.positions, pages, batch.slots, self._num_kv_heads, norms)
        attended = paged_attention(*parts, pages, spans, scale)
        return self.out.add_to(x, attended.view(len(x), -1))

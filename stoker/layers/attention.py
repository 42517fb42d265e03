"""Grouped-query attention over the paged KV cache. The q, k and v projections are one matmul."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from stoker.kernels.attention import paged_attention
from stoker.kernels.attention_grid import GridSpans
from stoker.kernels.dispatch import is_power_of_2
from stoker.kernels.rope_write import HeadNorms, rope_write
from stoker.layers.batch import GroupInputs
from stoker.layers.linear import Linear
from stoker.layers.norm import RMSNorm
from stoker.layers.quant import StoredAs
from stoker.parallel.shard import Shard


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool = False
    qk_norm_eps: float | None = None  # of a norm on each head's q and k before the rotary embedding; None: no norm
    partial: bool = False  # another rank adds the residual and the bias of the output

    def build(self, hidden_size: int, stored: StoredAs, name: str, in_features: int | None = None) -> Attention:
        """Build the attention of the layer `name`. `in_features` is the width of the input, by default `hidden_size`,
        which is that of the output."""
        return Attention(self, hidden_size, in_features or hidden_size, stored, name)

    def sharded(self, shard: Shard) -> AttentionConfig:
        """Return the attention of a rank: some of the heads."""
        heads, kv_heads = shard.heads(self.num_heads, self.num_kv_heads)
        sizes = (self.num_heads // heads.of, self.num_kv_heads // kv_heads.of)
        return replace(self, num_heads=sizes[0], num_kv_heads=sizes[1], partial=shard.is_partial)

    def active_weights(self, hidden_size: int) -> int:
        """Number of weights in the matmuls that one token passes through."""
        return 2 * hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)


class Attention(nn.Module):
    def __init__(
        self, config: AttentionConfig, hidden_size: int, in_features: int, stored: StoredAs, name: str
    ) -> None:
        super().__init__()
        num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        kv_size = num_kv_heads * head_dim
        # With 8-bit weights, the values are rotated, and so is the output of attention, which is linear in them.
        block = head_dim if is_power_of_2(head_dim) else None
        parts, blocks = (num_heads * head_dim, kv_size, kv_size), (1, 1, block or 1)
        self.qkv = Linear(in_features, parts, config.bias, stored(f"{name}.qkv"), out_blocks=blocks)
        self.out = Linear(
            num_heads * head_dim,
            hidden_size,
            config.bias and not config.partial,
            stored(f"{name}.out"),
            rotated_block=block,
            partial=config.partial,
        )
        self._qk_norm_eps = eps = config.qk_norm_eps
        if eps is not None:
            self.q_norm = RMSNorm(head_dim, eps)
            self.k_norm = RMSNorm(head_dim, eps)

    @property
    def width(self) -> int:
        """Values held per token at the same time: q, k and v, the rotated query, and the attention output."""
        return self.qkv.out_features + 2 * self.out.in_features

    @property
    def head_norms(self) -> HeadNorms | None:
        if self._qk_norm_eps is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self._qk_norm_eps)

    def forward(
        self, x: Tensor, norm: RMSNorm, where: GroupInputs, layer: int, positions: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Return x + attention(norm(x)). `layer` counts within the KV group. The memory of x is reused."""
        return self.add_attended(x, self.qkv(x, norm), where, layer, positions, cos, sin)

    def add_attended(
        self, total: Tensor, qkv: Tensor, where: GroupInputs, layer: int, positions: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Return total + attention, from the projected q, k and v. The memory of both is reused."""
        assert not isinstance(where.spans, GridSpans), "Int8Layer computes these"
        heads = qkv.view(len(qkv), -1, self.head_dim)
        pages, norms = where.kv.pages(layer), self.head_norms
        parts = rope_write(heads, cos, sin, positions, pages, where.slots, self.num_kv_heads, norms)
        attended = paged_attention(*parts, pages, where.spans, self.head_dim**-0.5)
        return self.out.add_to(total, attended.view(len(total), -1))

"""Grouped-query attention over the paged KV cache. The q, k and v projections are one matmul."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor, nn

from stoker.base.errors import ConfigError
from stoker.kernels.attention import paged_attention
from stoker.kernels.attention_grid import GridSpans
from stoker.kernels.cpu_int8 import Int8Kernel
from stoker.kernels.dispatch import is_power_of_2
from stoker.kernels.mla_split import SplitSpans
from stoker.kernels.rope_write import HeadNorms, rope_write
from stoker.kernels.rope_write import Temperature as Temperature
from stoker.kv.blocks.layout import KvGroup
from stoker.layers.batch import GroupInputs
from stoker.layers.linear import Linear
from stoker.layers.norm import RMSNorm
from stoker.layers.quant import StoredAs
from stoker.layers.rope import half_order
from stoker.layers.split_norm import NormSplit, norm_over_ranks
from stoker.parallel.mesh import ALONE, Mesh
from stoker.parallel.shard import Shard


class QkNorm(Enum):
    """What a norm of q and k covers. It comes before the rotary embedding, which does not change the length of a head:
    a norm without weights may come after it in the model's definition."""

    HEADS = "each head, with one weight for all heads"
    BARE_HEADS = "each head, without weights"
    ALL = "all heads of a token together"


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool = False  # of q, k and v
    qk_norm_eps: float | None = None  # of a norm of q and k before the rotary embedding; None: no norm
    rotated: int | None = None  # values of a head that the rotary embedding turns, the first ones; None: all
    interleaved: bool = False  # the two values of a rotated pair are neighbours in the checkpoint
    sinks: bool = False  # a learned logit of each head takes part in the softmax
    qk_norm: QkNorm = QkNorm.HEADS
    out_bias: bool | None = None  # of the output projection; None: as `bias`
    rotates: bool = True  # False: the layer has no rotary embedding
    temperature: Temperature | None = None
    partial: bool = False  # another rank adds the residual and the bias of the output
    norm_split: NormSplit | None = None  # for a norm over the heads of all ranks

    @property
    def has_norm_weights(self) -> bool:
        return self.qk_norm_eps is not None and self.qk_norm is not QkNorm.BARE_HEADS

    @property
    def order(self) -> tuple[int, ...]:
        """The order of the values in a head of q or k in which the kernels rotate them."""
        return half_order(self.head_dim, self.rotated or self.head_dim, self.interleaved)

    def build(self, hidden_size: int, stored: StoredAs, name: str, in_features: int | None = None) -> Attention:
        """Build the attention of the layer `name`. `in_features` is the width of the input, by default `hidden_size`,
        which is that of the output."""
        return Attention(self, hidden_size, in_features or hidden_size, stored, name)

    def kv_group(self, num_layers: int) -> KvGroup:
        """Return the KV of layers with this attention that see all tokens."""
        return KvGroup(num_layers, self.num_kv_heads, self.head_dim)

    def sharded(self, shard: Shard) -> AttentionConfig:
        """Return the attention of a rank: some of the heads."""
        if shard.cp > 1:
            raise ConfigError(
                f"cp={shard.cp}: only latent attention (MLA) can be split by context; ranks split these KV heads, so leave out --cp"
            )
        heads, kv_heads = shard.heads(self.num_heads, self.num_kv_heads)
        sizes = (self.num_heads // heads.of, self.num_kv_heads // kv_heads.of)
        split = None
        if self.qk_norm is QkNorm.ALL and shard.tp > 1:
            split = NormSplit(
                self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, shard.tp // kv_heads.of
            )
        return replace(self, num_heads=sizes[0], num_kv_heads=sizes[1], partial=shard.is_partial, norm_split=split)

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
        self._q_size, self._kv_size = num_heads * head_dim, (kv_size := num_kv_heads * head_dim)
        # With 8-bit weights, the values are rotated, and so is the output of attention, which is linear in them.
        block = head_dim if is_power_of_2(head_dim) else None
        parts, blocks = (num_heads * head_dim, kv_size, kv_size), (1, 1, block or 1)
        self.qkv = Linear(in_features, parts, config.bias, stored(f"{name}.qkv"), out_blocks=blocks)
        out_bias = config.bias if config.out_bias is None else config.out_bias
        self.out = Linear(
            num_heads * head_dim,
            hidden_size,
            out_bias and not config.partial,
            stored(f"{name}.out"),
            rotated_block=block,
            partial=config.partial,
        )
        self._qk_norm_eps = eps = config.qk_norm_eps
        self._qk_norm, self._rotates, self._temperature = config.qk_norm, config.rotates, config.temperature
        self.sinks = nn.Parameter(torch.empty(num_heads), requires_grad=False) if config.sinks else None
        if eps is not None and config.qk_norm is QkNorm.BARE_HEADS:
            self.register_buffer("ones", torch.ones(head_dim), persistent=False)
        elif config.has_norm_weights and eps is not None:
            is_whole = config.qk_norm is QkNorm.ALL
            self.q_norm = RMSNorm(num_heads * head_dim if is_whole else head_dim, eps)
            self.k_norm = RMSNorm(kv_size if is_whole else head_dim, eps)
        self._order, self._norm_split = config.order, config.norm_split
        self._mesh: Mesh = ALONE

    def join(self, mesh: Mesh) -> None:
        """Give the layer the other ranks, before its first step."""
        self._mesh = mesh

    def pack(self, int8: Int8Kernel | None = None, exact: bool = False) -> None:
        """Bring q and k into the order in which the kernels rotate them. The layers inside are packed after this."""
        order, width = self._order, self.head_dim
        if order == tuple(range(width)):
            return
        num_turned = self.num_heads + self.num_kv_heads
        turned = [head * width + value for head in range(num_turned) for value in order]
        self.qkv.reorder(turned)
        if self._qk_norm_eps is not None and self._qk_norm is not QkNorm.BARE_HEADS:
            for norm in (self.q_norm, self.k_norm):
                norm.weight.data = norm.weight.data.view(-1, width)[:, list(order)].flatten()

    @property
    def width(self) -> int:
        """Values held per token at the same time: q, k and v, the rotated query, and the attention output."""
        return self.qkv.out_features + 2 * self.out.in_features

    @property
    def is_plain(self) -> bool:
        """True if attention is as in Llama or Qwen3."""
        has_other_norm = self._qk_norm_eps is not None and self._qk_norm is not QkNorm.HEADS
        return self._rotates and self._temperature is None and self.sinks is None and not has_other_norm

    @property
    def head_norms(self) -> HeadNorms | None:
        if self._qk_norm_eps is None or self._qk_norm is QkNorm.ALL:
            return None
        if self._qk_norm is QkNorm.BARE_HEADS:
            ones = self.get_buffer("ones")
            return HeadNorms(ones, ones, self._qk_norm_eps)
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self._qk_norm_eps)

    def forward(
        self, x: Tensor, norm: RMSNorm, where: GroupInputs, layer: int, positions: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Return x + attention(norm(x)). `layer` counts within the KV group. The memory of x is reused."""
        return self.add_attended(x, self.qkv(x, norm), where, layer, positions, cos, sin)

    def project(self, x: Tensor) -> Tensor:
        """Return what `add_attended` takes, without a norm."""
        return self.qkv.plain(x)

    def add_attended(
        self, total: Tensor, qkv: Tensor, where: GroupInputs, layer: int, positions: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Return total + attention, from the projected q, k and v. The memory of both is reused."""
        assert not isinstance(where.spans, GridSpans | SplitSpans), "Int8Layer and LatentAttention compute these"
        if self._qk_norm_eps is not None and self._qk_norm is QkNorm.ALL:
            q, k = qkv[:, : self._q_size], qkv[:, self._q_size : -self._kv_size]
            if self._norm_split is None:
                q.copy_(self.q_norm(q))
                k.copy_(self.k_norm(k))
            else:
                weights = (self.q_norm.weight, self.k_norm.weight)
                norm_over_ranks(q, k, *weights, self._qk_norm_eps, self._norm_split, self._mesh)
        heads = qkv.view(len(qkv), -1, self.head_dim)
        pages, norms = where.kv.pages(layer), self.head_norms
        cos_or_none, sin_or_none = (cos, sin) if self._rotates else (None, None)
        where_to = (positions, pages, where.slots, self.num_kv_heads)
        parts = rope_write(heads, cos_or_none, sin_or_none, *where_to, norms, self._temperature)
        attended = paged_attention(*parts, pages, where.spans, self.head_dim**-0.5, self.sinks)
        return self.out.add_to(total, attended.view(len(total), -1))

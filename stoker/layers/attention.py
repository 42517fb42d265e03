"""Grouped-query attention over the paged cache, q, k and v as one product."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stoker.kernels.attention import paged_attention
from stoker.kernels.kv_write import kv_write
from stoker.kernels.rope import rope
from stoker.layers.batch import ForwardBatch
from stoker.layers.linear import Linear
from stoker.layers.norm import RMSNorm


class Attention(nn.Module):
    def __init__(
        self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, bias: bool, qk_norm_eps: float | None
    ) -> None:
        super().__init__()
        self._num_heads, self._num_kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self.qkv = Linear(hidden_size, (num_heads + 2 * num_kv_heads) * head_dim, bias)
        self.out = Linear(num_heads * head_dim, hidden_size, bias)
        has_norm = qk_norm_eps is not None
        self.q_norm = RMSNorm(head_dim, qk_norm_eps) if has_norm else nn.Identity()  # type: ignore[arg-type]
        self.k_norm = RMSNorm(head_dim, qk_norm_eps) if has_norm else nn.Identity()  # type: ignore[arg-type]
        self._has_norm = has_norm

    def forward(self, x: Tensor, batch: ForwardBatch, layer: int, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.qkv(x).view(len(x), -1, self._head_dim)
        turned, value = heads.split([self._num_heads + self._num_kv_heads, self._num_kv_heads], 1)
        if self._has_norm:
            query, key = turned.split([self._num_heads, self._num_kv_heads], 1)
            turned = torch.cat([self.q_norm(query), self.k_norm(key)], 1)
        query, key = rope(turned, cos, sin).split([self._num_heads, self._num_kv_heads], 1)
        kv_write(key, batch.kv.slots(layer, is_value=False), batch.slots)
        kv_write(value, batch.kv.slots(layer, is_value=True), batch.slots)
        scale = self._head_dim**-0.5
        found = paged_attention(query, batch.kv.pages(layer), batch.groups, self._num_kv_heads, scale)
        return self.out(found.view(len(x), -1))

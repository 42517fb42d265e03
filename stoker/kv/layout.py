"""KvLayout: what a block's bytes mean. Light: it counts bytes and gives shapes; device.py makes the tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class KvLayout:
    """A block is `[layers][K, V][heads][block_tokens][head_dim]`: one contiguous run for offload, head-major inside, so
    that ranks of another tensor-parallel size can take their heads."""

    num_layers: int
    num_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    dtype_bytes: int

    @property
    def block_shape(self) -> tuple[int, ...]:
        return (self.num_layers, 2, self.num_heads, self.block_tokens, self.head_dim)

    @property
    def block_bytes(self) -> int:
        return prod(self.block_shape) * self.dtype_bytes

    @property
    def fingerprint(self) -> str:
        return f"kv1:{self.dtype}:{'x'.join(map(str, self.block_shape))}"

"""KvLayout: what the bytes of a block mean, and which bytes of a block two ranks share.

This module counts bytes and computes shapes, without torch. kv/device/device_kv.py makes the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

# Bytes of the scale that each token and head has, by dtype. Other dtypes have no scales.
_SCALE_BYTES = {"float8_e4m3fn": 2, "int8": 2}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The layout of a block, `[layers][K, V][heads][block_tokens][head_dim]`. With a dtype that has scales, those of a
    head's tokens follow its values: `[layers][K, V][heads]([block_tokens][head_dim], [block_tokens])`.

    A block is contiguous, so that it can be offloaded in one copy. Heads come before tokens, so that ranks of another
    tensor-parallel size can take their heads. A rank holds `num_heads` of the model's `all_heads`, starting at
    `first_head`. The latent vector of MLA counts as one head that every rank holds.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    dtype_bytes: int
    first_head: int = 0
    all_heads: int | None = None  # None: num_heads

    @property
    def block_shape(self) -> tuple[int, ...]:
        return (self.num_layers, 2, self.num_heads, self.block_tokens, self.head_dim)

    @property
    def block_bytes(self) -> int:
        return prod(self.block_shape[:3]) * self.head_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of one token and head, K or V. 0: values have no scales."""
        return _SCALE_BYTES.get(self.dtype, 0)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in one layer, K or V. They are contiguous whatever heads a rank holds."""
        return self.block_tokens * (self.head_dim * self.dtype_bytes + self.scale_bytes)

    @property
    def end_head(self) -> int:
        return self.first_head + self.num_heads

    @property
    def model_heads(self) -> int:
        return self.num_heads if self.all_heads is None else self.all_heads

    @property
    def fingerprint(self) -> str:
        """Identifies the bytes of this rank, so that blocks of ranks with different heads are never mixed up."""
        shape = f"kv1:{self.dtype}:{'x'.join(map(str, self.block_shape))}"
        return shape if self.num_heads == self.model_heads else f"{shape}@{self.first_head}/{self.model_heads}"

    @property
    def identity(self) -> str:
        """The same for all ranks of one model, whatever the tensor-parallel size."""
        shape = (self.num_layers, 2, self.model_heads, self.block_tokens, self.head_dim)
        return f"kv1:{self.dtype}:{'x'.join(map(str, shape))}"


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """The bytes of some heads of a block: `count` runs of `num_bytes`, `stride` apart. The concatenated runs are the
    same bytes whatever other heads the block has."""

    offset: int
    stride: int
    num_bytes: int
    count: int

    @property
    def total_bytes(self) -> int:
        return self.num_bytes * self.count


def head_slice(layout: KvLayout, first_head: int, end_head: int) -> HeadSlice:
    """Return the slice of a block that holds these heads of the model. It is one run if it is the whole block."""
    assert layout.first_head <= first_head < end_head <= layout.end_head, f"{first_head}..{end_head} of {layout}"
    if end_head - first_head == layout.num_heads:
        return HeadSlice(0, layout.block_bytes, layout.block_bytes, 1)
    head = layout.head_bytes
    offset = (first_head - layout.first_head) * head
    return HeadSlice(offset, layout.num_heads * head, (end_head - first_head) * head, layout.num_layers * 2)

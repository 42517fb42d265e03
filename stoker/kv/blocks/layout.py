"""KvLayout: what a block's bytes mean, and which bytes of a block two ranks share. Light: it counts bytes and gives shapes;
device.py makes the tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class KvLayout:
    """A block is `[layers][K, V][heads][block_tokens][head_dim]`: one contiguous run for offload, head-major inside, so
    that ranks of another tensor-parallel size can take their heads. A rank holds `num_heads` of the model's `all_heads`,
    from `first_head` on; MLA's one latent counts as one head, which every rank holds."""

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
        return prod(self.block_shape) * self.dtype_bytes

    @property
    def head_bytes(self) -> int:
        """Of one head in one layer, K or V: what lies in one run whatever heads a rank holds."""
        return self.block_tokens * self.head_dim * self.dtype_bytes

    @property
    def end_head(self) -> int:
        return self.first_head + self.num_heads

    @property
    def model_heads(self) -> int:
        return self.num_heads if self.all_heads is None else self.all_heads

    @property
    def fingerprint(self) -> str:
        """Of this rank's own bytes: blocks of two ranks that hold different heads must not be taken for each other."""
        shape = f"kv1:{self.dtype}:{'x'.join(map(str, self.block_shape))}"
        return shape if self.num_heads == self.model_heads else f"{shape}@{self.first_head}/{self.model_heads}"

    @property
    def identity(self) -> str:
        """The same for all ranks of one model, whatever the tensor-parallel size."""
        shape = (self.num_layers, 2, self.model_heads, self.block_tokens, self.head_dim)
        return f"kv1:{self.dtype}:{'x'.join(map(str, shape))}"


@dataclass(frozen=True, slots=True)
class Part:
    """Some heads of a block: `count` runs of `num_bytes`, `stride` apart; their bytes one after the other are the same
    whatever other heads the block has."""

    offset: int
    stride: int
    num_bytes: int
    count: int

    @property
    def total_bytes(self) -> int:
        return self.num_bytes * self.count


def part_of(layout: KvLayout, first_head: int, end_head: int) -> Part:
    """The part of a block that holds these heads (of the model's); one run where it is the whole block."""
    assert layout.first_head <= first_head < end_head <= layout.end_head, f"{first_head}..{end_head} of {layout}"
    if end_head - first_head == layout.num_heads:
        return Part(0, layout.block_bytes, layout.block_bytes, 1)
    head = layout.head_bytes
    offset = (first_head - layout.first_head) * head
    return Part(offset, layout.num_heads * head, (end_head - first_head) * head, layout.num_layers * 2)


def shared_heads(src: KvLayout, dst: KvLayout) -> tuple[int, int]:
    """The heads that both hold, as first and end; none where the end is not after the first."""
    assert src.identity == dst.identity, f"{src.identity} and {dst.identity} share no bytes"
    return max(src.first_head, dst.first_head), min(src.end_head, dst.end_head)


@dataclass(frozen=True, slots=True)
class Piece:
    src_offset: int
    dst_offset: int
    num_bytes: int


def pieces(src: KvLayout, dst: KvLayout, heads: tuple[int, int] | None = None) -> list[Piece]:
    """The runs of bytes of one block that dst can take from src: one, where both hold the same heads. With `heads` (first and
    end, held by both) only those."""
    first, end = shared_heads(src, dst) if heads is None else heads
    if first >= end:
        return []
    if src.num_heads == dst.num_heads == end - first:
        return [Piece(0, 0, src.block_bytes)]
    head, num_bytes = src.head_bytes, (end - first) * src.head_bytes
    return [
        Piece(
            (at * src.num_heads + first - src.first_head) * head,
            (at * dst.num_heads + first - dst.first_head) * head,
            num_bytes,
        )
        for at in range(src.num_layers * 2)
    ]

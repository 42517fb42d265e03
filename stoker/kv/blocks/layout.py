"""KvLayout: what the bytes of a block mean, and which bytes of a block two ranks share.

A model family declares groups of layers whose KV has one shape. Groups that keep the same tokens are a set: they share
blocks. A block has one contiguous run of bytes per group of its set, in their order. This module counts bytes and
computes shapes, without torch. kv/device/device_kv.py makes the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, lcm

from stoker.kv.blocks.reach import EVERYTHING, KvReach

# Bytes of the scale that each token and head has, by dtype. Other dtypes have no scales.
_SCALE_BYTES = {"float8_e4m3fn": 2, "int8": 2}
_WIDE_BYTES = 2  # of a wide value, in a dtype with scales
# Segments that each layer has, by the kind of its group: K and V, or one for both.
_SEGMENTS = {"full": 2, "window": 2, "chunk": 2, "latent": 1}
KINDS = tuple(_SEGMENTS)
LOCAL_KINDS = ("window", "chunk")  # their layers see only the tokens nearby


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose KV has one shape: `num_heads` heads of `width` values per token, on all ranks together.

    `kind` says which tokens of a sequence the layers need, and what they hold of each. "full": K and V of all tokens.
    "window": K and V of the last `extent` tokens, the token itself included. "chunk": K and V of the tokens in the same
    chunk, which is position // extent. "latent": one segment for all tokens, MLA's compressed KV; it has one head, which
    every rank holds. A stage of a pipeline holds the `held` layers of the group, counted within the group. With a dtype
    that has scales, the last `wide` values of a token keep 16 bits.
    """

    num_layers: int
    num_heads: int
    width: int
    kind: str = "full"
    extent: int = 0  # tokens of a window or a chunk, else 0
    held: range | None = None  # None: all layers
    wide: int = 0

    def __post_init__(self) -> None:
        assert self.kind in _SEGMENTS, self.kind
        assert (self.extent > 0) == (self.kind in LOCAL_KINDS), f"{self.kind} with extent {self.extent}"
        assert 0 <= self.wide < self.width, f"{self.wide} of {self.width} values"
        assert self.held is None or 0 <= self.held.start < self.held.stop <= self.num_layers, f"{self.held} of {self}"

    @property
    def layers(self) -> range:
        """The layers of this rank, counted within the group."""
        return range(self.num_layers) if self.held is None else self.held

    @property
    def num_segments(self) -> int:
        """Segments of one layer. Each is `[heads][block_tokens][width]`."""
        return _SEGMENTS[self.kind]

    @property
    def reach(self) -> KvReach:
        """Which tokens the layers need."""
        return KvReach(self.kind, self.extent) if self.extent else EVERYTHING


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The place of a rank's part of a group in a block: `[layers][segments][heads]` pages from byte `offset` on.

    A page holds one head of one segment: `[block_tokens][width]`. With a dtype that has scales, the wide values of all
    tokens follow the others, and then come the scales.
    """

    group: KvGroup
    num_heads: int  # of the rank
    offset: int
    page_bytes: int

    @property
    def num_pages(self) -> int:
        return len(self.group.layers) * self.group.num_segments * self.num_heads

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes


@dataclass(frozen=True, slots=True)
class KvSet:
    """Groups that keep the same tokens of a sequence, and so share blocks. Each set has block memory, a block pool and
    block tables of its own."""

    reach: KvReach
    groups: tuple[int, ...]  # their places in the model's groups
    layout: KvLayout  # of the set's blocks


@dataclass(frozen=True)  # no slots: they would exclude cached properties
class KvLayout:
    """The layout of a model's KV, or of the blocks of one set.

    With several sets, only the layouts of the sets describe blocks.

    A block is contiguous, so that it can be offloaded in one copy. Heads come before tokens, so that ranks of another
    tensor-parallel size can take their heads. A rank holds `held_heads` of the layout's `model_heads`, starting at
    `first_head`, and the layers that its groups say. The heads of a layout are those of the group that has the fewest. A
    group with n times as many has n of its own for each of them.
    """

    groups: tuple[KvGroup, ...]
    block_tokens: int
    dtype: str
    dtype_bytes: int
    first_head: int = 0
    held_heads: int | None = None  # None: all
    part: int = 0  # this rank's part of the tokens of each block, if `num_parts` ranks split the context
    num_parts: int = 1

    def __post_init__(self) -> None:
        if self.block_tokens % self.num_parts:
            raise ValueError(f"blocks of {self.block_tokens} tokens cannot be split into {self.num_parts} parts")
        counts = [group.num_heads for group in self.groups]
        if gcd(*counts) != min(counts):
            raise ValueError(f"groups with {counts} heads: each number must be a multiple of the smallest")

    @classmethod
    def of(
        cls, num_layers: int, num_heads: int, width: int, block_tokens: int, dtype: str, dtype_bytes: int
    ) -> KvLayout:
        """Return the layout of a model whose layers are all alike."""
        return cls((KvGroup(num_layers, num_heads, width),), block_tokens, dtype, dtype_bytes)

    @cached_property
    def sets(self) -> tuple[KvSet, ...]:
        """The sets of the groups: those that keep all tokens are the first, then each kind and extent."""
        reaches = sorted({group.reach: None for group in self.groups}, key=lambda reach: reach.is_bounded)
        if len(reaches) == 1:
            return (KvSet(reaches[0], tuple(range(len(self.groups))), self),)
        return tuple(self._set(reach) for reach in reaches)

    def _set(self, reach: KvReach) -> KvSet:
        members = tuple(i for i, group in enumerate(self.groups) if group.reach == reach)
        groups = tuple(self.groups[i] for i in members)
        scale = min(group.num_heads for group in groups) // self.model_heads
        held = None if self.held_heads is None else self.held_heads * scale
        first = self.first_head * scale
        return KvSet(reach, members, replace(self, groups=groups, first_head=first, held_heads=held))

    @property
    def model_heads(self) -> int:
        """Heads of all ranks together."""
        return min(group.num_heads for group in self.groups)

    @property
    def num_heads(self) -> int:
        """Heads of this rank."""
        return self.model_heads if self.held_heads is None else self.held_heads

    @property
    def end_head(self) -> int:
        return self.first_head + self.num_heads

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of one token and head in one segment. 0: values have no scales."""
        return _SCALE_BYTES.get(self.dtype, 0)

    def page_bytes(self, group: KvGroup) -> int:
        """Return the bytes of one head in one segment. They are contiguous whatever heads a rank holds."""
        return self.page_tokens * sum(self.token_bytes(group))

    def token_bytes(self, group: KvGroup) -> tuple[int, ...]:
        """Return the bytes of one token in each array of a page: its values, or values, wide values and scales."""
        if not self.scale_bytes:
            return (group.width * self.dtype_bytes,)
        return (group.width - group.wide) * self.dtype_bytes, group.wide * _WIDE_BYTES, self.scale_bytes

    @property
    def page_tokens(self) -> int:
        """Tokens of a block that this rank holds."""
        return self.block_tokens // self.num_parts

    @property
    def tokens(self) -> range:
        """The tokens that this rank holds, counted within a block."""
        return range(self.part * self.page_tokens, (self.part + 1) * self.page_tokens)

    @cached_property
    def places(self) -> tuple[GroupLayout, ...]:
        """The place of each group of this rank in a block."""
        places: list[GroupLayout] = []
        for group in self.groups:
            offset = places[-1].offset + places[-1].num_bytes if places else 0
            heads = self.num_heads * (group.num_heads // self.model_heads)
            places.append(GroupLayout(group, heads, offset, self.page_bytes(group)))
        return tuple(places)

    @cached_property
    def used_bytes(self) -> int:
        """Bytes of a block that hold KV."""
        return self.places[-1].offset + self.places[-1].num_bytes

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a block: a multiple of each group's page, so that the pages of all blocks can be numbered. With one
        group, all of them hold KV."""
        unit = lcm(*(place.page_bytes for place in self.places))
        return -(-self.used_bytes // unit) * unit

    @property
    def fingerprint(self) -> str:
        """Identifies the bytes of this rank, so that blocks of ranks with different heads, layers or tokens are never mixed
        up."""
        return self._shape(self.num_heads) + self.shard_name

    @property
    def shard_name(self) -> str:
        """The heads, tokens and layers of this rank: a text that differs between ranks that hold different bytes. It is empty
        for a rank that holds all of them."""
        heads = "" if self.num_heads == self.model_heads else f"@{self.first_head}/{self.model_heads}"
        heads += "" if self.num_parts == 1 else f"%{self.part}/{self.num_parts}"
        if all(len(group.layers) == group.num_layers for group in self.groups):
            return heads
        return f"{heads}#" + "+".join(f"{group.layers.start}-{group.layers.stop}" for group in self.groups)

    @property
    def whole_part(self) -> BlockPart:
        """Everything that this rank holds."""
        tokens = None if self.num_parts == 1 else self.tokens
        return BlockPart(self.first_head, self.end_head, tuple(group.layers for group in self.groups), tokens)

    @property
    def identity(self) -> str:
        """The same for all ranks of one model, however it is split."""
        return self._shape(self.model_heads)

    def _shape(self, num_heads: int) -> str:
        """Describe the groups. The form for one full group is part of files and of peers' handshakes."""
        shapes = []
        for group in self.groups:
            heads = num_heads * (group.num_heads // self.model_heads)
            sizes = (group.num_layers, group.num_segments, heads, self.block_tokens, group.width)
            number = group.extent or (group.wide if self.scale_bytes else 0)
            kind = "" if group.kind == "full" else f"{group.kind}{number or ''}-"
            shapes.append(kind + "x".join(map(str, sizes)))
        return f"kv1:{self.dtype}:{'+'.join(shapes)}"


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Some heads, layers and tokens of a block, counted as in the whole model. `layers` has a range for each group."""

    first_head: int
    end_head: int
    layers: tuple[range, ...]
    tokens: range | None = None  # counted within the block. None: all of it

    def __str__(self) -> str:
        layers = ", ".join(f"{one.start} to {one.stop}" for one in self.layers)
        tokens = "" if self.tokens is None else f", tokens {self.tokens.start} to {self.tokens.stop}"
        return f"heads {self.first_head} to {self.end_head} of layers {layers}{tokens}"

    def is_held_by(self, layout: KvLayout) -> bool:
        """Return True if a rank with this layout holds all of it, and it is not empty."""
        return (
            layout.first_head <= self.first_head < self.end_head <= layout.end_head
            and len(self.layers) == len(layout.groups)
            and all(
                group.layers.start <= layers.start <= layers.stop <= group.layers.stop
                for group, layers in zip(layout.groups, self.layers, strict=True)
            )
            and any(self.layers)
            and (
                layout.num_parts == 1
                if self.tokens is None
                else layout.tokens.start <= self.tokens.start < self.tokens.stop <= layout.tokens.stop
            )
        )


@dataclass(frozen=True, slots=True)
class ByteRuns:
    """`count` runs of `num_bytes` bytes in a block, `stride` apart."""

    offset: int
    stride: int
    num_bytes: int
    count: int

    @property
    def total_bytes(self) -> int:
        return self.num_bytes * self.count


@dataclass(frozen=True, slots=True)
class BlockSlice:
    """The bytes of a part of a block. The concatenated runs are the same bytes whatever else the block holds."""

    runs: tuple[ByteRuns, ...]  # in the order of the groups, or a single run for all that a rank holds

    @property
    def total_bytes(self) -> int:
        return sum(runs.total_bytes for runs in self.runs)

    @property
    def is_one_run(self) -> bool:
        return len(self.runs) == 1 and self.runs[0].count == 1


def block_slice(layout: KvLayout, part: BlockPart) -> BlockSlice:
    """Return the slice of a block that holds this part. It is one run if it is all that the rank holds, unless the context
    is split and the bytes of several pages would have to be reordered."""
    assert part.is_held_by(layout), f"{part} of {layout}"
    if part.tokens is not None:
        return BlockSlice(tuple(_token_runs(layout, part, part.tokens)))
    if part == layout.whole_part:
        return BlockSlice((ByteRuns(0, layout.used_bytes, layout.used_bytes, 1),))
    runs = []
    for place, layers in zip(layout.places, part.layers, strict=True):
        if not layers:
            continue
        head = place.page_bytes * (place.num_heads // layout.num_heads)
        stride = place.num_heads * place.page_bytes
        skipped = (layers.start - place.group.layers.start) * place.group.num_segments
        count = len(layers) * place.group.num_segments
        if part.end_head - part.first_head == layout.num_heads:  # neighbouring layers are contiguous
            runs.append(ByteRuns(place.offset + skipped * stride, count * stride, count * stride, 1))
            continue
        first = place.offset + skipped * stride + (part.first_head - layout.first_head) * head
        runs.append(ByteRuns(first, stride, (part.end_head - part.first_head) * head, count))
    return BlockSlice(tuple(runs))


def _token_runs(layout: KvLayout, part: BlockPart, tokens: range) -> Iterator[ByteRuns]:
    """Yield the runs of some tokens of a block: for each group and head the values of all layers, then the wide values, then
    the scales. This order does not depend on how many tokens of a block the rank holds."""
    skipped = tokens.start - layout.tokens.start
    for place, layers in zip(layout.places, part.layers, strict=True):
        if not layers:
            continue
        each = place.num_heads // layout.num_heads
        stride, count = place.num_heads * place.page_bytes, len(layers) * place.group.num_segments
        first = place.offset + (layers.start - place.group.layers.start) * place.group.num_segments * stride
        arrays = layout.token_bytes(place.group)
        for head in range((part.first_head - layout.first_head) * each, (part.end_head - layout.first_head) * each):
            page = first + head * place.page_bytes
            if len(tokens) * arrays[0] == stride:  # the tokens are whole pages, and the pages are contiguous
                yield ByteRuns(page, count * stride, count * stride, 1)
                continue
            for num_bytes in filter(None, arrays):
                yield ByteRuns(page + skipped * num_bytes, stride, len(tokens) * num_bytes, count)
                page += layout.page_tokens * num_bytes

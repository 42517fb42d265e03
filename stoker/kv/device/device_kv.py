"""DeviceKv: the tensors that hold the device's KV blocks, in the views that the kernels need.

Each KV set has block memory of its own (SetKv): tiers and transports move the blocks of one set.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.kernels.attention_grid import LayerSlots
from stoker.kernels.block_split import ALL_TOKENS, BlockSplit
from stoker.kernels.reach import Reach
from stoker.kernels.transfer import to_device
from stoker.kv.blocks.layout import GroupLayout, KvGroup, KvLayout


@dataclass(frozen=True, eq=False)  # no slots: they would exclude cached properties
class GroupKv:
    """The pages of one group of layers, in all blocks of a device."""

    num_layers: int
    num_segments: int
    num_heads: int
    width: int
    block_tokens: int
    pages_per_block: int  # the distance between the same page of two neighbouring blocks
    all_pages: Tensor  # [pages, values of a page], from the group's first page on
    kind: str  # see KvGroup
    extent: int
    kv_set: int = 0  # the group uses its block tables
    split: BlockSplit = ALL_TOKENS  # which tokens of each block are here

    @property
    def page_tokens(self) -> int:
        """Tokens of a block that are here."""
        return self.split.page_tokens(self.block_tokens)

    @cached_property
    def reach(self) -> Reach:
        """Which tokens the layers see."""
        return Reach.of(self.kind, self.extent)

    def pages(self, layer: int) -> Tensor:
        """Return a view that starts at the first page of a layer, counted within the group. With the kind "full", page
        `block * pages_per_block + head` holds K, and page `+ num_heads` holds V."""
        return self.all_pages[layer * self.num_segments * self.num_heads :]

    def slots(self, layer: int) -> LayerSlots:
        """Return what attention on a CPU needs of a layer's pages."""
        return self._layer_slots[layer]

    @cached_property
    def _layer_slots(self) -> list[LayerSlots]:
        sizes = (self.num_heads, self.width, len(self.pages(self.num_layers - 1)))
        return [LayerSlots.of(self.pages(layer), *sizes) for layer in range(self.num_layers)]


class SetKv:
    """The memory of the blocks of one KV set on one device."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        """`layout` is that of the set's blocks."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.memory_fd: int | None = None
        """The file behind blocks in RAM, which other processes of this machine can map. None on a GPU."""
        stored = _stored_dtype(layout)
        shape = (num_blocks, layout.block_bytes // stored.itemsize)
        if device.type == "cpu":
            self.memory_fd, raw = _shareable(num_blocks * layout.block_bytes)
            weakref.finalize(self, os.close, self.memory_fd)  # the memory is freed only after the file is closed
            self.blocks = torch.from_numpy(raw).view(stored).view(shape)
        else:
            self.blocks = torch.zeros(shape, dtype=stored, device=device)
        """[blocks, values of a block]"""

    def host_blocks(self) -> NDArray[np.uint8] | None:
        """Return blocks in RAM as [num_blocks, block_bytes] without a copy, or None on a GPU."""
        if self.blocks.device.type != "cpu":
            return None
        return self.blocks.view(torch.uint8).numpy()


class DeviceKv:
    """The memory of all KV blocks of one device, set by set. `dtype` is the model's, by default that of the blocks.

    `draft` is the group of a draft model. It has the block numbers of the first set and memory of its own: it is not a
    part of the blocks that tiers and other workers know.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int | Sequence[int],
        device: torch.device,
        dtype: torch.dtype | None = None,
        draft: KvGroup | None = None,
    ) -> None:
        """`num_blocks` are those of each set, or one number for all of them."""
        self.layout = layout
        self.device = device
        counts = [num_blocks] * len(layout.sets) if isinstance(num_blocks, int) else list(num_blocks)
        self.sets = tuple(SetKv(one.layout, count, device) for one, count in zip(layout.sets, counts, strict=True))
        kv_dtype = getattr(torch, layout.dtype)
        self.like = torch.empty(0, dtype=dtype or kv_dtype, device=device)
        """An empty tensor with the dtype and the device of the model's activations."""
        groups: dict[int, GroupKv] = {}
        for kv_set, (one, memory) in enumerate(zip(layout.sets, self.sets, strict=True)):
            for number, place in zip(one.groups, one.layout.places, strict=True):
                groups[number] = _group_kv(memory.blocks, place, one.layout, kv_dtype, kv_set)
        self.groups = tuple(groups[number] for number in range(len(layout.groups)))
        self.draft: GroupKv | None = None
        self._draft_blocks: list[Tensor] = []  # the memory of the draft model's group, if there is one
        if draft is not None:
            alone, stored = _alone(draft, layout), _stored_dtype(layout)
            shape = (self.sets[0].num_blocks, alone.block_bytes // stored.itemsize)
            self._draft_blocks = [torch.zeros(shape, dtype=stored, device=device)]
            self.draft = _group_kv(self._draft_blocks[0], alone.places[0], alone, kv_dtype)

    @property
    def all_groups(self) -> tuple[GroupKv, ...]:
        """The model's groups, then that of the draft model."""
        return self.groups if self.draft is None else (*self.groups, self.draft)

    @property
    def blocks(self) -> Tensor:
        """The blocks of the first set, [blocks, values of a block]."""
        return self.sets[0].blocks

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks, those of the draft model's group included."""
        return sum(blocks.nbytes for blocks in (*(one.blocks for one in self.sets), *self._draft_blocks))

    def copy(self, src: Sequence[int], dst: Sequence[int], kv_set: int = 0) -> None:
        source, target = to_device(src, self.device), to_device(dst, self.device)
        for blocks in (self.sets[kv_set].blocks, *([] if kv_set else self._draft_blocks)):
            blocks.index_copy_(0, target, blocks[source])

    def clear(self, blocks: Sequence[int], kv_set: int = 0) -> None:
        memory = self.sets[kv_set].blocks
        torch._foreach_zero_([memory[block] for block in blocks])
        if not kv_set:
            self.clear_draft(blocks)

    def clear_draft(self, blocks: Sequence[int]) -> None:
        """Clear the draft model's part of blocks that are loaded: a load brings the other groups only, and an earlier
        owner's KV must not be read. Drafts then come from zeros, which costs speed and no answer."""
        for own in self._draft_blocks:
            torch._foreach_zero_([own[block] for block in blocks])


def draft_block_bytes(draft: KvGroup | None, layout: KvLayout) -> int:
    """Return the bytes that a draft model's group takes per block."""
    return 0 if draft is None else _alone(draft, layout).block_bytes


def _alone(draft: KvGroup, layout: KvLayout) -> KvLayout:
    """Return the layout of the memory that has only the draft model's group."""
    return KvLayout((draft,), layout.block_tokens, layout.dtype, layout.dtype_bytes)


def _stored_dtype(layout: KvLayout) -> torch.dtype:
    """Return the dtype of the tensors that hold blocks. torch cannot index every 8-bit dtype."""
    return torch.uint8 if layout.scale_bytes else getattr(torch, layout.dtype)


def _group_kv(blocks: Tensor, place: GroupLayout, layout: KvLayout, dtype: torch.dtype, kv_set: int = 0) -> GroupKv:
    pages = blocks.view(-1)[place.offset // blocks.itemsize :].view(dtype)
    values = place.page_bytes // pages.itemsize
    return GroupKv(
        num_layers=len(place.group.layers),
        num_segments=place.group.num_segments,
        num_heads=place.num_heads,
        width=place.group.width,
        block_tokens=layout.block_tokens,
        pages_per_block=layout.block_bytes // place.page_bytes,
        all_pages=pages[: len(pages) // values * values].view(-1, values),
        kind=place.group.kind,
        extent=place.group.extent,
        kv_set=kv_set,
        split=BlockSplit(layout.part, layout.num_parts),
    )


def _shareable(num_bytes: int) -> tuple[int, NDArray[np.uint8]]:
    """Return anonymous memory that other processes can map through the file descriptor. The kernel provides zeroed
    pages at first touch, so unused memory costs nothing and a start does not wait for it."""
    fd = os.memfd_create("stoker-kv", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd, np.frombuffer(mmap.mmap(fd, num_bytes), dtype=np.uint8)

"""DeviceKv: the tensors that hold the device's KV blocks, in the views that the kernels need."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from functools import cached_property
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.kernels.attention_grid import LayerSlots
from stoker.kernels.transfer import to_device
from stoker.kv.blocks.layout import KvLayout


class DeviceKv:
    """The memory of all KV blocks of one device. `dtype` is the model's, by default that of the blocks."""

    def __init__(
        self, layout: KvLayout, num_blocks: int, device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.memory_fd: int | None = None
        """The file behind blocks in RAM, which other processes of this machine can map. None on a GPU."""
        kv_dtype = getattr(torch, layout.dtype)
        stored = torch.uint8 if layout.scale_bytes else kv_dtype  # torch cannot index every 8-bit dtype
        self.like = torch.empty(0, dtype=dtype or kv_dtype, device=device)
        """An empty tensor with the dtype and the device of the model's activations."""
        shape = (num_blocks, *layout.block_shape)
        if layout.scale_bytes:
            shape = (num_blocks, *layout.block_shape[:3], layout.head_bytes)
        if device.type == "cpu":
            self.memory_fd, raw = _shareable(prod(shape) * stored.itemsize)
            weakref.finalize(self, os.close, self.memory_fd)  # the memory is freed only after the file is closed
            self.blocks = torch.from_numpy(raw).view(stored).view(shape)
        else:
            self.blocks = torch.zeros(shape, dtype=stored, device=device)
        self._pages = self.blocks.view(kv_dtype).view(-1, layout.head_bytes // stored.itemsize)

    @property
    def pages_per_block(self) -> int:
        return self.layout.num_layers * 2 * self.layout.num_heads

    def pages(self, layer: int) -> Tensor:
        """Return a view that starts at the layer's first page. Page `block * pages_per_block + head` holds K, and page
        `+ num_heads` holds V."""
        return self._pages[layer * 2 * self.layout.num_heads :]

    def slots(self, layer: int) -> LayerSlots:
        """Return what attention on a CPU needs of a layer's pages."""
        return self._layer_slots[layer]

    @cached_property
    def _layer_slots(self) -> list[LayerSlots]:
        layout = self.layout
        num_pages = len(self.pages(layout.num_layers - 1))
        sizes = (layout.num_heads, layout.head_dim, num_pages)
        return [LayerSlots.of(self.pages(layer), *sizes) for layer in range(layout.num_layers)]

    def host_blocks(self) -> NDArray[np.uint8] | None:
        """Return blocks in RAM as [num_blocks, block_bytes] without a copy, or None on a GPU."""
        if self.blocks.device.type != "cpu":
            return None
        return self.blocks.view(self.num_blocks, -1).view(torch.uint8).numpy()

    def copy(self, src: Sequence[int], dst: Sequence[int]) -> None:
        device = self.blocks.device
        self.blocks.index_copy_(0, to_device(dst, device), self.blocks[to_device(src, device)])

    def clear(self, blocks: Sequence[int]) -> None:
        torch._foreach_zero_([self.blocks[block] for block in blocks])


def _shareable(num_bytes: int) -> tuple[int, NDArray[np.uint8]]:
    """Return anonymous memory that other processes can map through the file descriptor. The kernel provides zeroed
    pages at first touch, so unused memory costs nothing and a start does not wait for it."""
    fd = os.memfd_create("stoker-kv", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd, np.frombuffer(mmap.mmap(fd, num_bytes), dtype=np.uint8)

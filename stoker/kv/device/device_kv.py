"""DeviceKv: the tensors of the device's KV blocks, as the kernels want to see them."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.kernels.transfer import to_device
from stoker.kv.blocks.layout import KvLayout


class DeviceKv:
    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.memory_fd: int | None = None
        """In RAM: the file whose mapping the blocks are, so that another process of this machine can map them too."""
        dtype = getattr(torch, layout.dtype)
        shape = (num_blocks, *layout.block_shape)
        if device.type == "cpu":
            self.memory_fd, raw = _shareable(prod(shape) * dtype.itemsize)
            weakref.finalize(self, os.close, self.memory_fd)  # while it is open, the memory is not given back
            self.blocks = torch.from_numpy(raw).view(dtype).view(shape)
        else:
            self.blocks = torch.zeros(shape, dtype=dtype, device=device)
        self._pages = self.blocks.view(-1, layout.block_tokens * layout.head_dim)

    @property
    def pages_per_block(self) -> int:
        return self.layout.num_layers * 2 * self.layout.num_heads

    def pages(self, layer: int) -> Tensor:
        """From the layer's first page on: page `block * pages_per_block + head` is K, `+ num_heads` is V."""
        return self._pages[layer * 2 * self.layout.num_heads :]

    def host_blocks(self) -> NDArray[np.uint8] | None:
        """In RAM: [num_blocks, block_bytes], the blocks themselves. None on a card."""
        if self.blocks.device.type != "cpu":
            return None
        return self.blocks.view(self.num_blocks, -1).view(torch.uint8).numpy()

    def copy(self, src: Sequence[int], dst: Sequence[int]) -> None:
        device = self.blocks.device
        self.blocks.index_copy_(0, to_device(dst, device), self.blocks[to_device(src, device)])

    def clear(self, blocks: Sequence[int]) -> None:
        torch._foreach_zero_([self.blocks[block] for block in blocks])


def _shareable(num_bytes: int) -> tuple[int, NDArray[np.uint8]]:
    """Memory of a file without a name, which ends with the processes that use it. The kernel hands out zero pages as they
    are first touched: memory that is not used is not taken, and a start does not wait for it."""
    fd = os.memfd_create("stoker-kv", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd, np.frombuffer(mmap.mmap(fd, num_bytes), dtype=np.uint8)

"""DeviceKv: the tensors of the device's KV blocks, as the kernels want to see them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from stoker.kernels.transfer import to_device
from stoker.kv.layout import KvLayout


class DeviceKv:
    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.blocks = _zeros((num_blocks, *layout.block_shape), getattr(torch, layout.dtype), device)
        self._pages = self.blocks.view(-1, layout.block_tokens * layout.head_dim)
        self._slots = self.blocks.view(-1, layout.head_dim)

    @property
    def pages_per_block(self) -> int:
        return self.layout.num_layers * 2 * self.layout.num_heads

    def pages(self, layer: int) -> Tensor:
        """From the layer's first page on: page `block * pages_per_block + head` is K, `+ num_heads` is V."""
        return self._pages[layer * 2 * self.layout.num_heads :]

    def slots(self, layer: int, is_value: bool) -> Tensor:
        """The same a row a token: slot `page * block_tokens + token`."""
        return self._slots[(layer * 2 + is_value) * self.layout.num_heads * self.layout.block_tokens :]

    def copy(self, src: Sequence[int], dst: Sequence[int]) -> None:
        device = self.blocks.device
        self.blocks.index_copy_(0, to_device(dst, device), self.blocks[to_device(src, device)])

    def clear(self, blocks: Sequence[int]) -> None:
        self.blocks.index_fill_(0, to_device(blocks, self.blocks.device), 0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """In RAM the kernel hands out zero pages as they are first touched: memory that is not used is not taken, and a start
    does not wait for it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)

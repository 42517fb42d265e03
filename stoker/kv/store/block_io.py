"""Between the device's blocks and bytes in RAM. In RAM itself a block is its own buffer; on a card bytes go through pinned
memory, on a stream of their own, so that no step waits for them.

Whoever fills blocks has them to itself, from a moment on that `mark` notes: work launched before it may still use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.base.ids import BlockId
from stoker.kv.device.device_kv import DeviceKv

HostBytes = NDArray[np.uint8]  # one block


class Mark(Protocol):
    def wait(self) -> None:
        """Until all that was launched before the mark is done."""


class BlockIo(Protocol):
    def mark(self) -> Mark:
        """By the thread that launches steps."""

    def read(self, blocks: Sequence[BlockId], into: Sequence[HostBytes]) -> None: ...

    def write(self, data: Sequence[HostBytes], blocks: Sequence[BlockId]) -> None:
        """When this returns, every step launched from now on sees the bytes."""

    def own_buffer(self, block: BlockId) -> HostBytes | None:
        """The block itself, if it can be written in place."""


class _Now:
    def wait(self) -> None:
        return


class HostBlockIo:
    def __init__(self, kv: DeviceKv) -> None:
        blocks = kv.host_blocks()
        assert blocks is not None, "the blocks are not in RAM"
        self._blocks = blocks

    def mark(self) -> Mark:
        return _Now()  # a step in RAM is done when its launch returns

    def read(self, blocks: Sequence[BlockId], into: Sequence[HostBytes]) -> None:
        for block, buffer in zip(blocks, into, strict=True):
            np.copyto(buffer, self._blocks[block])

    def write(self, data: Sequence[HostBytes], blocks: Sequence[BlockId]) -> None:
        for block, buffer in zip(blocks, data, strict=True):
            np.copyto(self._blocks[block], buffer)

    def own_buffer(self, block: BlockId) -> HostBytes | None:
        own: HostBytes = self._blocks[block]
        return own


class CudaBlockIo:
    """Copies are asynchronous only from and to pinned memory; buffers that are not make them slower, not wrong."""

    def __init__(self, kv: DeviceKv) -> None:
        self._device = kv.blocks.device
        self._blocks = kv.blocks.view(kv.num_blocks, -1).view(torch.uint8)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def mark(self) -> Mark:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return _CudaMark(event)

    def read(self, blocks: Sequence[BlockId], into: Sequence[HostBytes]) -> None:
        with torch.cuda.stream(self._stream):
            for block, buffer in zip(blocks, into, strict=True):
                torch.from_numpy(buffer).copy_(self._blocks[block], non_blocking=True)
            self._finish()

    def write(self, data: Sequence[HostBytes], blocks: Sequence[BlockId]) -> None:
        with torch.cuda.stream(self._stream):
            for block, buffer in zip(blocks, data, strict=True):
                self._blocks[block].copy_(torch.from_numpy(buffer), non_blocking=True)
            self._finish()

    def own_buffer(self, block: BlockId) -> HostBytes | None:
        return None

    def _finish(self) -> None:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        event.synchronize()


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


def block_io(kv: DeviceKv) -> BlockIo:
    return CudaBlockIo(kv) if kv.blocks.is_cuda else HostBlockIo(kv)

"""Copies between the device's blocks and buffers in RAM.

If the device is the CPU, a block is its own buffer. On a GPU, bytes go through pinned memory on a separate stream, so
that no step waits for them.

A thread that fills blocks has them for itself from the moment that a `mark` records. Work that was launched before the
mark may still use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.base.ids import BlockId
from stoker.kv.device.device_kv import SetKv

HostBytes = NDArray[np.uint8]  # one block


class Mark(Protocol):
    """A point in the sequence of launched work."""

    def wait(self) -> None:
        """Wait until all work that was launched before the mark is done."""


class BlockIo(Protocol):
    """Reads and writes blocks of the device."""

    def mark(self) -> Mark:
        """Record the work launched so far. Called by the thread that launches steps."""

    def read(self, blocks: Sequence[BlockId], into: Sequence[HostBytes]) -> None:
        """Copy blocks into buffers."""

    def write(self, data: Sequence[HostBytes], blocks: Sequence[BlockId]) -> None:
        """Copy buffers into blocks. Every step launched after the return sees the bytes."""

    def own_buffer(self, block: BlockId) -> HostBytes | None:
        """Return the block itself if it can be written in place, otherwise None."""


class _CompletedMark:
    def wait(self) -> None:
        return


class HostBlockIo:
    """Blocks in RAM."""

    def __init__(self, kv: SetKv) -> None:
        blocks = kv.host_blocks()
        assert blocks is not None, "the blocks are not in RAM"
        self._blocks = blocks

    def mark(self) -> Mark:
        return _CompletedMark()  # a step on the CPU is done when its launch returns

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
    """Blocks on a GPU. Copies are asynchronous only from and to pinned memory. Other buffers make them slower, not
    wrong."""

    def __init__(self, kv: SetKv) -> None:
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


def block_io(kv: SetKv) -> BlockIo:
    return CudaBlockIo(kv) if kv.blocks.is_cuda else HostBlockIo(kv)

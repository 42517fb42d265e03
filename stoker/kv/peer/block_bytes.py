"""Blocks of a pool as host bytes, in both directions, wherever the pool lies.

A source gives parts of blocks as contiguous bytes, a sink takes them. In RAM these are the pool's own bytes wherever a part is
one run. A pool on a card goes through pinned buffers on a stream of its own, one copy ahead of whoever uses the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.base.ids import BlockId
from stoker.kernels.transfer import to_device
from stoker.kv.blocks.layout import HeadSlice
from stoker.kv.device.checksum import HostBytes, checksum, tensor_checksums
from stoker.kv.device.device_kv import DeviceKv

_NUM_STAGED = 4  # pinned buffers, a block each
_GATHER_BYTES = 1 << 28  # of blocks that are put side by side on a card at one time

BeforeWrite = Callable[[torch.cuda.Stream], None]
"""Makes the stream wait until nothing that was launched before can still use the blocks that are about to be written."""


class BlockSource(Protocol):
    def host(self, blocks: Sequence[BlockId], part: HeadSlice) -> Iterator[HostBytes]:
        """Of each block in turn this part, valid until the next is asked for."""

    def checksums(self, blocks: Sequence[BlockId], part: HeadSlice) -> list[int]: ...


class BlockSink(Protocol):
    """Where the parts of blocks 0, 1, ... of a pull go."""

    @property
    def part(self) -> HeadSlice: ...

    @property
    def into(self) -> Sequence[BlockId] | None:
        """The pool's own blocks; None where it is other memory."""

    @property
    def is_direct(self) -> bool:
        """Whether buffers are the blocks themselves, so that threads may fill several at a time."""

    def buffer(self, index: int) -> HostBytes:
        """Contiguous, `part.total_bytes` long. Placed, or given up, before the next is asked for, unless it is direct."""

    def place(self, index: int) -> None:
        """The buffer holds the right bytes."""

    def finish(self) -> None:
        """What was placed is there when this comes back."""


def source_of(kv: DeviceKv) -> BlockSource:
    host = kv.host_blocks()
    return CudaSource(kv) if host is None else HostSource(host)


def sink_of(kv: DeviceKv, blocks: Sequence[BlockId], part: HeadSlice, before_write: BeforeWrite) -> BlockSink:
    host = kv.host_blocks()
    return (
        CudaSink(kv, blocks, part, before_write)
        if host is None
        else HostSink([host[one] for one in blocks], part, blocks)
    )


def runs_of(block: HostBytes, part: HeadSlice) -> NDArray[np.uint8]:
    """[count, num_bytes]: a view."""
    return np.ndarray((part.count, part.num_bytes), np.uint8, block, part.offset, (part.stride, 1))


def device_runs(pool: Tensor, block_bytes: int, part: HeadSlice) -> Tensor:
    """[num_blocks, count, num_bytes]: a view of a pool of bytes, on its device."""
    size = (len(pool) // block_bytes, part.count, part.num_bytes)
    return pool.as_strided(size, (block_bytes, part.stride, 1), pool.storage_offset() + part.offset)


def _runs(kv: DeviceKv, part: HeadSlice) -> Tensor:
    return device_runs(kv.blocks.view(-1).view(torch.uint8), kv.layout.block_bytes, part)


class HostSource:
    def __init__(self, pool: NDArray[np.uint8]) -> None:
        self._pool = pool

    def host(self, blocks: Sequence[BlockId], part: HeadSlice) -> Iterator[HostBytes]:
        if part.count == 1:
            for block in blocks:
                yield self._pool[block, part.offset : part.offset + part.num_bytes]
            return
        scratch = np.empty(part.total_bytes, np.uint8)
        for block in blocks:
            np.copyto(scratch.reshape(part.count, part.num_bytes), runs_of(self._pool[block], part))
            yield scratch

    def checksums(self, blocks: Sequence[BlockId], part: HeadSlice) -> list[int]:
        return [checksum(data) for data in self.host(blocks, part)]


class HostSink:
    def __init__(self, blocks: Sequence[HostBytes], part: HeadSlice, into: Sequence[BlockId] | None) -> None:
        self.part = part
        self.into = into
        self.is_direct = part.count == 1
        self._blocks = blocks
        self._scratch = np.empty(0 if self.is_direct else part.total_bytes, np.uint8)

    def buffer(self, index: int) -> HostBytes:
        if self.is_direct:
            return self._blocks[index][self.part.offset : self.part.offset + self.part.num_bytes]
        return self._scratch

    def place(self, index: int) -> None:
        if not self.is_direct:
            runs = self._scratch.reshape(self.part.count, self.part.num_bytes)
            np.copyto(runs_of(self._blocks[index], self.part), runs)

    def finish(self) -> None:
        pass


class CudaSource:
    def __init__(self, kv: DeviceKv) -> None:
        self._kv = kv

    def host(self, blocks: Sequence[BlockId], part: HeadSlice) -> Iterator[HostBytes]:
        runs, stream = _runs(self._kv, part), _stream(self._kv)
        slots, done = _pinned(part), _events()

        def start(at: int) -> None:
            with torch.cuda.stream(stream):
                slots[at % _NUM_STAGED].view(part.count, part.num_bytes).copy_(runs[blocks[at]], non_blocking=True)
                done[at % _NUM_STAGED].record(stream)

        for at in range(min(_NUM_STAGED - 1, len(blocks))):
            start(at)
        for at in range(len(blocks)):
            # The slot of the block before this one is free again: its bytes were used before this one was asked for.
            if at + _NUM_STAGED - 1 < len(blocks):
                start(at + _NUM_STAGED - 1)
            done[at % _NUM_STAGED].synchronize()
            yield slots[at % _NUM_STAGED].numpy()

    def checksums(self, blocks: Sequence[BlockId], part: HeadSlice) -> list[int]:
        runs, device = _runs(self._kv, part), self._kv.blocks.device
        step = max(1, _GATHER_BYTES // part.total_bytes)
        found: list[int] = []
        with torch.cuda.stream(_stream(self._kv)):
            for start in range(0, len(blocks), step):
                some = runs.index_select(0, to_device(blocks[start : start + step], device))
                found += tensor_checksums(some.view(len(some), -1))
        return found


class CudaSink:
    is_direct = False

    def __init__(self, kv: DeviceKv, blocks: Sequence[BlockId], part: HeadSlice, before_write: BeforeWrite) -> None:
        self.part = part
        self.into: Sequence[BlockId] = blocks
        self.stream = _stream(kv)
        self._runs = _runs(kv, part)
        self._slots: list[Tensor] = []  # made when first needed: bytes may also come from another card
        self._done = _events()
        before_write(self.stream)

    def buffer(self, index: int) -> HostBytes:
        self._slots = self._slots or _pinned(self.part)
        self._done[index % _NUM_STAGED].synchronize()  # of an event never recorded it comes back at once
        return self._slots[index % _NUM_STAGED].numpy()

    def place(self, index: int) -> None:
        slot = self._slots[index % _NUM_STAGED].view(self.part.count, self.part.num_bytes)
        with torch.cuda.stream(self.stream):
            self._runs[self.into[index]].copy_(slot, non_blocking=True)
            self._done[index % _NUM_STAGED].record(self.stream)

    def place_device(self, first: int, data: Tensor) -> None:
        """The parts of block `first` and on, which lie on the pool's card already; on the current stream."""
        blocks = to_device(self.into[first : first + len(data)], data.device)
        self._runs.index_copy_(0, blocks, data.view(len(data), self.part.count, self.part.num_bytes))

    def finish(self) -> None:
        self.stream.synchronize()


def _pinned(part: HeadSlice) -> list[Tensor]:
    return [torch.empty(part.total_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(_NUM_STAGED)]


def _events() -> list[torch.cuda.Event]:
    # "blocking": the thread sleeps until it comes to pass, instead of asking again and again.
    return [torch.cuda.Event(blocking=True) for _ in range(_NUM_STAGED)]  # type: ignore[no-untyped-call]


def _stream(kv: DeviceKv) -> torch.cuda.Stream:
    return torch.cuda.Stream(kv.blocks.device)  # type: ignore[no-untyped-call]

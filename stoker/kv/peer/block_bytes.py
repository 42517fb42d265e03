"""Blocks of the device pool as host bytes, in both directions, whether the pool is in RAM or on a GPU.

A source provides slices of blocks as contiguous bytes, and a sink accepts them. In RAM these are the pool's own bytes
if a slice is one run. A pool on a GPU goes through pinned buffers on a separate stream, several copies ahead of the
reader.
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
from stoker.kv.blocks.layout import BlockSlice, ByteRuns
from stoker.kv.device.checksum import HostBytes, checksum, tensor_checksums
from stoker.kv.device.device_kv import SetKv

_NUM_STAGED = 4  # pinned buffers of one block each
_GATHER_BYTES = 1 << 28  # most bytes that are gathered on a GPU at one time

BeforeWrite = Callable[[torch.cuda.Stream], None]
"""Makes a stream wait until no work launched earlier can still use the blocks that it is about to write."""


class BlockSource(Protocol):
    """Reads slices of the pool's blocks."""

    def host(self, blocks: Sequence[BlockId], part: BlockSlice) -> Iterator[HostBytes]:
        """Yield this slice of each block in turn. The bytes are valid until the next one is requested."""

    def checksums(self, blocks: Sequence[BlockId], part: BlockSlice) -> list[int]:
        """Return the checksum of this slice of each block."""


class BlockSink(Protocol):
    """The destination of a pull's blocks 0, 1, ..."""

    @property
    def part(self) -> BlockSlice: ...

    @property
    def into(self) -> Sequence[BlockId] | None:
        """The blocks of the pool, or None if the destination is other memory."""

    @property
    def is_direct(self) -> bool:
        """True if buffers are the blocks themselves, so that threads may fill several at a time."""

    def buffer(self, index: int) -> HostBytes:
        """Return a contiguous buffer of `part.total_bytes`. Unless the sink is direct, it must be placed or dropped
        before the next one is requested."""

    def place(self, index: int) -> None:
        """The buffer holds the correct bytes: put them into the block."""

    def finish(self) -> None:
        """Wait until everything that was placed is in the blocks."""


def source_of(kv: SetKv) -> BlockSource:
    """Return the source for a pool."""
    host = kv.host_blocks()
    return CudaSource(kv) if host is None else HostSource(host)


def sink_of(kv: SetKv, blocks: Sequence[BlockId], part: BlockSlice, before_write: BeforeWrite) -> BlockSink:
    """Return a sink into these blocks of a pool."""
    host = kv.host_blocks()
    return (
        CudaSink(kv, blocks, part, before_write)
        if host is None
        else HostSink([host[block] for block in blocks], part, blocks)
    )


def runs_of(block: HostBytes, runs: ByteRuns) -> NDArray[np.uint8]:
    """Return a view [count, num_bytes] of runs of a block."""
    return np.ndarray((runs.count, runs.num_bytes), np.uint8, block, runs.offset, (runs.stride, 1))


def gather(block: HostBytes, part: BlockSlice, into: HostBytes) -> None:
    """Copy a slice of a block into a contiguous buffer."""
    first = 0
    for runs in part.runs:
        np.copyto(into[first : first + runs.total_bytes].reshape(runs.count, runs.num_bytes), runs_of(block, runs))
        first += runs.total_bytes


def scatter(data: HostBytes, part: BlockSlice, block: HostBytes) -> None:
    """Copy a contiguous buffer into a slice of a block."""
    first = 0
    for runs in part.runs:
        np.copyto(runs_of(block, runs), data[first : first + runs.total_bytes].reshape(runs.count, runs.num_bytes))
        first += runs.total_bytes


def device_runs(pool: Tensor, block_bytes: int, runs: ByteRuns) -> Tensor:
    """Return a view [num_blocks, count, num_bytes] of runs of all blocks of a pool of bytes, on its device."""
    size = (len(pool) // block_bytes, runs.count, runs.num_bytes)
    return pool.as_strided(size, (block_bytes, runs.stride, 1), pool.storage_offset() + runs.offset)


class DevicePool:
    """The bytes of all blocks on one device. Slices of them are copied on the current stream."""

    def __init__(self, pool: Tensor, block_bytes: int, part: BlockSlice) -> None:
        """`pool` is a flat tensor of bytes."""
        self._runs = [device_runs(pool, block_bytes, runs) for runs in part.runs]
        self._sizes = [runs.total_bytes for runs in part.runs]

    @classmethod
    def of(cls, kv: SetKv, part: BlockSlice) -> DevicePool:
        return cls(kv.blocks.view(-1).view(torch.uint8), kv.layout.block_bytes, part)

    def read(self, block: BlockId, into: Tensor) -> None:
        """Copy the slice of one block into a flat buffer, without waiting."""
        for runs, data in zip(self._runs, torch.split(into, self._sizes), strict=True):
            data.view(runs.shape[1:]).copy_(runs[block], non_blocking=True)

    def write(self, block: BlockId, data: Tensor) -> None:
        """Copy a flat buffer into the slice of one block, without waiting."""
        for runs, own in zip(self._runs, torch.split(data, self._sizes), strict=True):
            runs[block].copy_(own.view(runs.shape[1:]), non_blocking=True)

    def select(self, blocks: Sequence[BlockId]) -> Tensor:
        """Return the slices of blocks, [blocks, num_bytes]."""
        index = to_device(blocks, self._runs[0].device)
        found = [runs.index_select(0, index).flatten(1) for runs in self._runs]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def put(self, blocks: Sequence[BlockId], data: Tensor) -> None:
        """Copy [blocks, num_bytes] into the slices of blocks."""
        index = to_device(blocks, data.device)
        for runs, own in zip(self._runs, torch.split(data, self._sizes, 1), strict=True):
            runs.index_copy_(0, index, own.reshape(len(data), *runs.shape[1:]))


class HostSource:
    def __init__(self, pool: NDArray[np.uint8]) -> None:
        self._pool = pool

    def host(self, blocks: Sequence[BlockId], part: BlockSlice) -> Iterator[HostBytes]:
        if part.is_one_run:
            (run,) = part.runs
            for block in blocks:
                yield self._pool[block, run.offset : run.offset + run.num_bytes]
            return
        scratch = np.empty(part.total_bytes, np.uint8)
        for block in blocks:
            gather(self._pool[block], part, scratch)
            yield scratch

    def checksums(self, blocks: Sequence[BlockId], part: BlockSlice) -> list[int]:
        return [checksum(data) for data in self.host(blocks, part)]


class HostSink:
    def __init__(self, blocks: Sequence[HostBytes], part: BlockSlice, into: Sequence[BlockId] | None) -> None:
        self.part = part
        self.into = into
        self.is_direct = part.is_one_run
        self._blocks = blocks
        self._scratch = np.empty(0 if self.is_direct else part.total_bytes, np.uint8)

    def buffer(self, index: int) -> HostBytes:
        if self.is_direct:
            (run,) = self.part.runs
            return self._blocks[index][run.offset : run.offset + run.num_bytes]
        return self._scratch

    def place(self, index: int) -> None:
        if not self.is_direct:
            scatter(self._scratch, self.part, self._blocks[index])

    def finish(self) -> None:
        pass


class CudaSource:
    def __init__(self, kv: SetKv) -> None:
        self._kv = kv

    def host(self, blocks: Sequence[BlockId], part: BlockSlice) -> Iterator[HostBytes]:
        pool, stream = DevicePool.of(self._kv, part), _stream(self._kv)
        slots, done = _pinned(part), _events()

        def start(i: int) -> None:
            with torch.cuda.stream(stream):
                pool.read(blocks[i], slots[i % _NUM_STAGED])
                done[i % _NUM_STAGED].record(stream)

        for i in range(min(_NUM_STAGED - 1, len(blocks))):
            start(i)
        for i in range(len(blocks)):
            # The previous block's slot is free again: its bytes were used before this block was requested.
            if i + _NUM_STAGED - 1 < len(blocks):
                start(i + _NUM_STAGED - 1)
            done[i % _NUM_STAGED].synchronize()
            yield slots[i % _NUM_STAGED].numpy()

    def checksums(self, blocks: Sequence[BlockId], part: BlockSlice) -> list[int]:
        pool = DevicePool.of(self._kv, part)
        step = max(1, _GATHER_BYTES // part.total_bytes)
        values: list[int] = []
        with torch.cuda.stream(_stream(self._kv)):
            for start in range(0, len(blocks), step):
                values += tensor_checksums(pool.select(blocks[start : start + step]))
        return values


class CudaSink:
    is_direct = False

    def __init__(self, kv: SetKv, blocks: Sequence[BlockId], part: BlockSlice, before_write: BeforeWrite) -> None:
        self.part = part
        self.into: Sequence[BlockId] = blocks
        self.stream = _stream(kv)
        self._pool = DevicePool.of(kv, part)
        self._slots: list[Tensor] = []  # allocated when first needed: bytes may also come from another GPU
        self._done = _events()
        before_write(self.stream)

    def buffer(self, index: int) -> HostBytes:
        self._slots = self._slots or _pinned(self.part)
        self._done[index % _NUM_STAGED].synchronize()  # returns at once for an event that was never recorded
        return self._slots[index % _NUM_STAGED].numpy()

    def place(self, index: int) -> None:
        with torch.cuda.stream(self.stream):
            self._pool.write(self.into[index], self._slots[index % _NUM_STAGED])
            self._done[index % _NUM_STAGED].record(self.stream)

    def place_device(self, first: int, data: Tensor) -> None:
        """Put slices that are already on the pool's GPU into block `first` and the following ones, on the current
        stream."""
        self._pool.put(self.into[first : first + len(data)], data)

    def finish(self) -> None:
        self.stream.synchronize()


def _pinned(part: BlockSlice) -> list[Tensor]:
    return [torch.empty(part.total_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(_NUM_STAGED)]


def _events() -> list[torch.cuda.Event]:
    # "blocking": the thread sleeps until the event is reached instead of polling
    return [torch.cuda.Event(blocking=True) for _ in range(_NUM_STAGED)]  # type: ignore[no-untyped-call]


def _stream(kv: SetKv) -> torch.cuda.Stream:
    return torch.cuda.Stream(kv.blocks.device)  # type: ignore[no-untyped-call]

"""WriteBehind: writes newly computed blocks into the tiers without delaying the engine.

A block is held in the device pool only until its bytes are copied into a buffer and checksummed. The tiers write from
the buffer, each on its own thread, so that a slow tier does not delay the others. Buffers and queues are bounded: a
block that finds no free buffer or queue is not written. The engine never waits here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from stoker.base.ids import BlockKey
from stoker.kv.blocks.transfer import BlockName, OfferedBlock, TierUnavailable
from stoker.kv.device.checksum import checksum
from stoker.kv.store.block_io import BlockIo, HostBytes
from stoker.kv.store.buffer_pool import BufferPool
from stoker.kv.store.measured_tier import MeasuredTier

_BATCH_BLOCKS = 8


@dataclass(slots=True, eq=False)
class _Staged:
    """A block in a buffer, and how many tiers still have to write it."""

    name: BlockName
    data: HostBytes
    checksum: int
    num_writers: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    def done(self) -> bool:
        """Count one tier as done. Returns True for the last one."""
        with self.lock:
            self.num_writers -= 1
            return self.num_writers == 0


Stored = Callable[[MeasuredTier, Sequence[BlockName]], None]


class _Writer:
    """The thread that writes into one tier."""

    def __init__(self, tier: MeasuredTier, buffers: BufferPool, stored: Stored) -> None:
        self.tier = tier
        self._buffers = buffers
        self._stored = stored
        self._queue: SimpleQueue[_Staged | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kv-write-{tier.name}", daemon=True)
        self._thread.start()

    @property
    def num_queued(self) -> int:
        return self._queue.qsize()

    def put(self, staged: _Staged) -> None:
        self._queue.put(staged)

    def close(self, timeout_s: float) -> None:
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            batch = [first]
            while len(batch) < _BATCH_BLOCKS and not self._queue.empty():
                item = self._queue.get()
                if item is None:
                    self._queue.put(None)
                    break
                batch.append(item)
            self._write(batch)
            self._buffers.give_back(staged.data for staged in batch if staged.done())

    def _write(self, batch: list[_Staged]) -> None:
        names = [staged.name for staged in batch]
        try:
            taken = self.tier.write(names, [staged.data for staged in batch], [staged.checksum for staged in batch])
        except TierUnavailable:
            return
        written = [name for name, is_there in zip(names, taken, strict=True) if is_there]
        if written:
            self._stored(self.tier, written)


class WriteBehind:
    """Copies offered blocks to the tiers on other threads. At most `max_queued` blocks wait for each tier.

    `wake` is called when blocks can be released, and `stored` when a tier has taken some.
    """

    def __init__(
        self,
        tiers: Sequence[MeasuredTier],
        io: BlockIo,
        buffers: BufferPool,
        max_queued: int,
        wake: Callable[[], None],
        stored: Stored,
    ) -> None:
        self._io = io
        self._max_queued = max_queued
        self._buffers = buffers
        self._wake = wake
        self._writers = [_Writer(tier, buffers, stored) for tier in tiers]
        self._offered: SimpleQueue[list[OfferedBlock] | None] = SimpleQueue()
        self._copied: deque[OfferedBlock] = deque()
        self._thread = threading.Thread(target=self._run, name="kv-offer", daemon=True)
        self._thread.start()

    def offer(self, offered: list[OfferedBlock]) -> None:
        if offered:
            self._offered.put(offered)

    def take_copied(self) -> list[OfferedBlock]:
        """Return offered blocks that need not be held any longer."""
        return [self._copied.popleft() for _ in range(len(self._copied))]

    @property
    def num_queued(self) -> list[int]:
        """How many blocks wait for each tier."""
        return [writer.num_queued for writer in self._writers]

    def close(self, timeout_s: float) -> None:
        self._offered.put(None)
        self._thread.join(timeout_s)
        for writer in self._writers:
            writer.close(timeout_s)

    def _run(self) -> None:
        while (offered := self._offered.get()) is not None:
            wanted = self._wanted([offer.name.key for offer in offered])
            for offer, writers in zip(offered, wanted, strict=True):
                if writers:
                    self._stage(offer, writers)
                self._copied.append(offer)
            self._wake()

    def _wanted(self, keys: list[BlockKey]) -> list[list[_Writer]]:
        """For each block, return the writers of the tiers that do not have it."""
        wanted: list[list[_Writer]] = [[] for _ in keys]
        for writer in self._writers:
            for writers, is_there in zip(wanted, writer.tier.find(keys), strict=True):
                if not is_there:
                    writers.append(writer)
        return wanted

    def _stage(self, offer: OfferedBlock, writers: list[_Writer]) -> None:
        """Copy a block into a buffer and queue it for these writers, or count it as declined."""
        ready = [writer for writer in writers if writer.num_queued < self._max_queued]
        for writer in writers:
            if writer not in ready:
                writer.tier.counters.declined += 1
        if not ready:
            return
        buffer = self._buffers.take()
        if buffer is None:
            for writer in ready:
                writer.tier.counters.declined += 1
            return
        self._io.read([offer.block], [buffer])
        staged = _Staged(offer.name, buffer, checksum(buffer), len(ready))
        for writer in ready:
            writer.put(staged)

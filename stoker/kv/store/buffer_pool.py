"""BufferPool: a bounded set of block-sized buffers in RAM, for blocks on their way between the device and the tiers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from mmap import mmap
from threading import Lock

import numpy as np
import torch

from stoker.base.log import EventLog
from stoker.kv.store.block_io import HostBytes

HEADROOM_BYTES = 4096  # reserved before each buffer, for a tier that puts a header in front of a block
_ALLOCATION_PAUSE_S = 10.0  # no new buffer is allocated for this long after an allocation failed

log = EventLog("kv")


def new_buffer(block_bytes: int, pinned: bool = False) -> HostBytes:
    """Allocate a buffer that begins on a page boundary, as direct I/O requires, with HEADROOM_BYTES before it."""
    size = HEADROOM_BYTES + block_bytes
    if pinned:
        memory: HostBytes = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    else:
        memory = np.frombuffer(mmap(-1, size), dtype=np.uint8)
    return memory[HEADROOM_BYTES:]


class BufferPool:
    """A bounded set of block-sized buffers, pinned if there is a GPU. `take` never waits."""

    def __init__(self, count: int, block_bytes: int, pinned: bool) -> None:
        self._lock = Lock()
        self._free: list[HostBytes] = []
        self._left = count  # buffers are allocated when first needed, because pinning memory is slow
        self._block_bytes = block_bytes
        self._pinned = pinned
        self._pause_until_s = 0.0

    def take(self) -> HostBytes | None:
        """Return a buffer, or None if all are in use or no more memory can be allocated."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._left == 0 or time.monotonic() < self._pause_until_s:
                return None
            self._left -= 1
        try:
            return self._allocate()
        except (OSError, RuntimeError) as error:  # RuntimeError: memory cannot be pinned
            with self._lock:
                self._left += 1
                self._pause_until_s = time.monotonic() + _ALLOCATION_PAUSE_S
            log.warning(
                "kv_buffer_allocation_failed", bytes=self._block_bytes, reason=str(error), pause_s=_ALLOCATION_PAUSE_S
            )
            return None

    def give_back(self, buffers: Iterable[HostBytes]) -> None:
        with self._lock:
            self._free.extend(buffers)

    def abandon(self, buffers: Sequence[HostBytes]) -> None:
        """Give up buffers that a hanging call may still write into. New ones may be allocated in their place."""
        with self._lock:
            self._left += len(buffers)

    def take_or_allocate(self) -> HostBytes:
        """Return a buffer of the set, or allocate an additional one."""
        buffer = self.take()
        return self._allocate() if buffer is None else buffer

    def _allocate(self) -> HostBytes:
        return new_buffer(self._block_bytes, self._pinned)

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
    """Begins on a page: direct I/O needs that. HEADROOM_BYTES lie before it."""
    size = HEADROOM_BYTES + block_bytes
    if pinned:
        memory: HostBytes = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    else:
        memory = np.frombuffer(mmap(-1, size), dtype=np.uint8)
    return memory[HEADROOM_BYTES:]


class BufferPool:
    """A bounded set of block-sized buffers, pinned where there is a card, as many as memory allows. Taking one never waits."""

    def __init__(self, count: int, block_bytes: int, pinned: bool) -> None:
        self._lock = Lock()
        self._free: list[HostBytes] = []
        self._left = count  # made when first needed: pinning takes its time
        self._block_bytes = block_bytes
        self._pinned = pinned
        self._pause_until_s = 0.0

    def take(self) -> HostBytes | None:
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._left == 0 or time.monotonic() < self._pause_until_s:
                return None
            self._left -= 1
        try:
            return self._make()
        except (OSError, RuntimeError) as failed:  # the latter where memory cannot be pinned
            with self._lock:
                self._left += 1
                self._pause_until_s = time.monotonic() + _ALLOCATION_PAUSE_S
            log.warning("kv_buffer_not_made", bytes=self._block_bytes, reason=str(failed), pause_s=_ALLOCATION_PAUSE_S)
            return None

    def give_back(self, buffers: Iterable[HostBytes]) -> None:
        with self._lock:
            self._free.extend(buffers)

    def lose(self, buffers: Sequence[HostBytes]) -> None:
        """Somebody may still write into them: others take their place."""
        with self._lock:
            self._left += len(buffers)

    def obtain(self) -> HostBytes:
        """One of the set, or one more, for whoever cannot go without."""
        buffer = self.take()
        return self._make() if buffer is None else buffer

    def _make(self) -> HostBytes:
        return new_buffer(self._block_bytes, self._pinned)

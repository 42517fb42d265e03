"""Staging buffers: where bytes lie between a client that may hang and the buffers of whoever asked for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from mmap import mmap

import numpy as np

from stoker.kv.tiers.contract import HostBytes


class Ring:
    """Buffers of one size in one piece of memory, which starts on a page. Taking some waits until there are enough."""

    def __init__(self, count: int, object_bytes: int) -> None:
        self.memory = np.frombuffer(mmap(-1, count * object_bytes), dtype=np.uint8)
        self._slots = self.memory.reshape(count, object_bytes)
        self._free = list(range(count))
        self._freed = threading.Condition()

    def take(self, count: int, deadline_s: float) -> list[int]:
        """All or none, within the deadline."""
        with self._freed:
            if not self._freed.wait_for(lambda: len(self._free) >= count, timeout=deadline_s):
                return []
            taken = self._free[-count:]
            del self._free[-count:]
            return taken

    def give_back(self, slots: Sequence[int]) -> None:
        with self._freed:
            self._free.extend(slots)
            self._freed.notify_all()

    def at(self, slot: int) -> HostBytes:
        buffer: HostBytes = self._slots[slot]
        return buffer

    def addresses(self, slots: Sequence[int]) -> list[int]:
        start, size = self.memory.ctypes.data, self._slots.shape[1]
        return [start + slot * size for slot in slots]

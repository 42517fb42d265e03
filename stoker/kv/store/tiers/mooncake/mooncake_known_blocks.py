"""KnownBlocks: the blocks that this worker has written into Mooncake or read from it, as far as it knows that they are
still there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from stoker.base.ids import BlockKey
from stoker.kv.blocks.transfer import BlockName
from stoker.kv.store.tiers.mooncake.mooncake_object import ObjectFormat
from stoker.kv.store.tiers.name_order import parents_first

_MAX_BLOCKS = 1 << 16


class KnownBlocks:
    """Blocks by age, oldest first. Thread-safe."""

    def __init__(self, format: ObjectFormat, on_evicted: Callable[[Sequence[BlockKey]], None]) -> None:
        self._format = format
        self._on_evicted = on_evicted
        self._lock = threading.Lock()
        self._headers: dict[BlockKey, bytes] = {}  # oldest first
        # Blocks that were forgotten in the current and in the last period, see `start_period`.
        self._forgotten: dict[BlockKey, None] = {}
        self._forgotten_before: dict[BlockKey, None] = {}
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._headers)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._headers

    def add(self, name: BlockName) -> None:
        packed = self._format.pack(name, 0)  # the checksum is not needed to announce a block
        dropped: list[BlockKey] = []
        with self._lock:
            self._headers.pop(name.key, None)
            if packed is not None:
                self._headers[name.key] = packed
            while len(self._headers) > _MAX_BLOCKS:
                dropped.append(next(iter(self._headers)))
                del self._headers[dropped[-1]]
        if dropped:  # they may still exist, but their removal would not be noticed
            self._on_evicted(dropped)

    def drop(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Remove blocks, and return those that were known."""
        with self._lock:
            return [key for key in keys if self._headers.pop(key, None) is not None]

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Remove blocks that are gone from the store, and report them."""
        if gone := self.drop(keys):
            self.num_evicted += len(gone)
            with self._lock:
                self._forgotten.update(dict.fromkeys(gone))
            self._on_evicted(gone)

    def start_period(self) -> None:
        """Start a period of `recently_forgotten`, because the master was just seen to have its keys."""
        with self._lock:
            self._forgotten_before, self._forgotten = self._forgotten, {}

    def recently_forgotten(self) -> list[BlockKey]:
        """Return the blocks that were forgotten in this period and in the one before. If the master has lost its keys,
        these may have been forgotten because of that."""
        with self._lock:
            return list(self._forgotten_before | self._forgotten)

    def oldest(self, count: int | None = None) -> list[BlockKey]:
        with self._lock:
            return list(self._headers)[:count]

    def renew(self, keys: Sequence[BlockKey]) -> None:
        """Make blocks the youngest, because they were just seen."""
        with self._lock:
            for key in keys:
                if (packed := self._headers.pop(key, None)) is not None:
                    self._headers[key] = packed

    def names(self) -> Iterator[BlockName]:
        with self._lock:
            known = list(self._headers.items())
        headers = (self._format.unpack(packed, key) for key, packed in known)
        return parents_first([header.name for header in headers if header is not None])

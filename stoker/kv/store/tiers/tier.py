"""The contract of a tier: blocks of bytes by key, kept somewhere slower and larger than the device.

A tier is called by the store's threads, several at a time, and may block; it must not hold the GIL while bytes move. It is
a cache: whatever is missing, late, torn or wrong is a miss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.base.config import StoreSettings
from stoker.base.ids import BlockKey
from stoker.base.registry import Registry
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.blocks.transfer import BlockName

HostBytes = NDArray[np.uint8]  # one block, contiguous, `layout.block_bytes` long


def _nothing(keys: Sequence[BlockKey]) -> None:
    return


@dataclass(slots=True)
class TierStats:
    """Gauges as they are; counters since the start of this process."""

    blocks: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    evicted: int = 0
    corrupt: int = 0  # blocks found wrong, dropped and not served
    errors: int = 0


@dataclass(frozen=True, slots=True)
class TierContext:
    """What a tier is made for. `fingerprint` is that of the key's root: blocks of another one never have the same key."""

    fingerprint: str
    layout: KvLayout
    on_evicted: Callable[[Sequence[BlockKey]], None]  # called from any thread, when this tier lost blocks that it had
    on_forgotten: Callable[[Sequence[BlockKey]], None] = _nothing  # likewise, where it would take them again
    room_bytes: int = 0  # that lie before every buffer that the tier gets, for it to use while it has the buffer


class Tier(Protocol):
    medium: ClassVar[str]
    """What KV events call it: CPU, DISK, MOONCAKE."""

    shared: bool
    """Whether other workers read and write the same blocks."""

    def find(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which of them are here, at this moment. Quick: at most milliseconds for a thousand keys."""

    def read(self, keys: Sequence[BlockKey], into: Sequence[HostBytes]) -> list[bool]:
        """True: the block's own bytes, checked, are in its buffer. False: missing or wrong; its buffer may hold anything.
        A wrong block is dropped and counted. TierUnavailable: nothing can be had now; a call that hangs may yet fill the
        buffers, which nobody may use for anything else."""

    def write(self, names: Sequence[BlockName], data: Sequence[HostBytes], sums: Sequence[int]) -> list[bool]:
        """True: it is here now, also if it was before. False: declined, for now or for good. `sums`: the blocks' checksums, made
        once for all tiers; bytes that no longer have it by the time they are written are found wrong when they are read."""

    def drop(self, keys: Sequence[BlockKey]) -> None: ...

    def catch_up(self) -> None:
        """Called every second or so, whatever else is asked: tell of blocks that other processes removed. May be late for
        those that died over it. TierUnavailable: not now."""

    def names(self) -> Iterator[BlockName]:
        """All that it holds, as far as it can tell: for listeners that come late. Parents before children where known."""

    def stats(self) -> TierStats: ...

    def close(self) -> None: ...


class TierFactory(Protocol):
    def __call__(self, settings: StoreSettings, context: TierContext) -> Tier | None:
        """None: the settings do not ask for this tier."""


TIERS: Registry[TierFactory] = Registry("tier", "stoker.kv.store.tiers")

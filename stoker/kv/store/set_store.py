"""SetStore: the part of the KV store that moves the blocks of one KV set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stoker.base.ids import BlockKey
from stoker.kv.blocks.reach import EVERYTHING, KvReach
from stoker.kv.store.block_io import BlockIo
from stoker.kv.store.bounded_reader import BoundedReader
from stoker.kv.store.buffer_pool import BufferPool
from stoker.kv.store.loader import Loader, Peers
from stoker.kv.store.measured_tier import MeasuredTier, first_holders
from stoker.kv.store.tier_prefetcher import TierPrefetcher
from stoker.kv.store.write_behind import Stored, WriteBehind


@dataclass(frozen=True, slots=True)
class SetParts:
    """What the store gets for each KV set. The tiers hold blocks of this set only."""

    tiers: Sequence[MeasuredTier]
    io: BlockIo
    block_bytes: int
    reach: KvReach = EVERYTHING


class SetStore:
    """The tiers of one KV set, and what reads and writes them."""

    def __init__(
        self,
        number: int,
        parts: SetParts,
        peers: Peers,
        num_buffers: int,
        pinned: bool,
        compute_s: Callable[[int], float],
        wake: Callable[[], None],
        stored: Stored,
    ) -> None:
        """`number` is that of the set. `stored` is called when a tier has taken blocks."""
        self.tiers = list(parts.tiers)
        self.reach = parts.reach
        self.block_bytes = parts.block_bytes
        buffers = BufferPool(num_buffers, parts.block_bytes, pinned)
        self._bounded_reader = BoundedReader(self.tiers, buffers)
        self.loader = Loader(
            self.tiers, peers, parts.io, buffers, self._bounded_reader, parts.block_bytes, compute_s, number
        )
        self.write_behind = WriteBehind(self.tiers, parts.io, buffers, num_buffers // 2, wake, stored)
        self.prefetcher = TierPrefetcher(self.tiers, peers, buffers, self._bounded_reader, stored, number)

    def held(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Return which blocks a tier holds and can load faster than they can be computed."""
        return [tier is not None and self.loader.is_worth(tier) for tier in first_holders(self.tiers, keys)]

    def measure(self) -> None:
        for tier in self.tiers:
            tier.measure(self.block_bytes)

    def maintain(self) -> None:
        """Let tiers report what other processes removed, and measure those again that were too slow."""
        for tier in self.tiers:
            if tier.backend.shared_location is not None:
                tier.catch_up()
            if not self.loader.is_worth(tier):
                tier.measure_again(self.block_bytes)

    def close(self, timeout_s: float) -> None:
        """Stop reading and writing."""
        self._bounded_reader.close()
        self.write_behind.close(timeout_s)

    def close_tiers(self) -> None:
        for tier in self.tiers:
            tier.backend.close()

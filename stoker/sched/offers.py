"""Offers: newly computed blocks, held in the pool until the store has copied them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.base.ids import BlockId
from stoker.kv.blocks.transfer import OfferedBlock
from stoker.sched.block_sets import BlockSets
from stoker.sched.sequence import Sequence


class Offers:
    """The open offers of one scheduler.

    At most `max_offers` blocks of a KV set are offered at a time, and a quarter of its pool, because an offered block cannot
    be reused. Further blocks are not offered. Zero means that there is no store.
    """

    def __init__(self, max_offers: int, sets: BlockSets) -> None:
        self._left = [min(max_offers, pool.num_blocks // 4) for pool in sets.pools]  # further offers of each KV set
        self._pools = sets.pools
        self.is_open = max_offers > 0
        """False if there is no store."""
        self._new: list[OfferedBlock] = []

    def add(self, seq: Sequence, i: int, block: BlockId, kv_set: int) -> None:
        """Offer the sequence's block `i` of a KV set, if there is room for another offer."""
        if self._left[kv_set]:
            self._left[kv_set] -= 1
            self._pools[kv_set].hold([block])
            self._new.append(OfferedBlock(seq.block_name(i), block, kv_set))

    def take(self) -> list[OfferedBlock]:
        """Return the blocks offered since the last call."""
        new, self._new = self._new, []
        return new

    def end(self, ended: Iterable[OfferedBlock]) -> None:
        """Release blocks that the store has copied or does not want."""
        for offered in ended:
            self._left[offered.kv_set] += 1
            self._pools[offered.kv_set].release([offered.block])

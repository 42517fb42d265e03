"""Offers: newly computed blocks, held in the pool until the store has copied them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.base.ids import BlockId
from stoker.kv.blocks.pool import BlockPool
from stoker.kv.blocks.transfer import OfferedBlock
from stoker.sched.sequence import Sequence


class Offers:
    """The open offers of one scheduler.

    At most `max_offers` blocks are offered at a time, because an offered block cannot be reused. Further blocks are not
    offered. Zero means that there is no store.
    """

    def __init__(self, max_offers: int, pool: BlockPool) -> None:
        self._max_offers = max_offers
        self._pool = pool
        self._new: list[OfferedBlock] = []
        self._num_open = 0

    def add(self, seq: Sequence, i: int) -> None:
        """Offer the sequence's block `i`, if there is room for another offer."""
        if self._num_open < self._max_offers:
            self._num_open += 1
            self._pool.hold([seq.blocks[i]])
            self._new.append(OfferedBlock(seq.block_name(i), seq.blocks[i]))

    def take(self) -> list[OfferedBlock]:
        """Return the blocks offered since the last call."""
        new, self._new = self._new, []
        return new

    def end(self, blocks: Iterable[BlockId]) -> None:
        """Release blocks that the store has copied or does not want."""
        ended = list(blocks)
        self._num_open -= len(ended)
        self._pool.release(ended)

"""Offers: blocks just named, kept in the pool until the store has copied them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.base.ids import BlockId
from stoker.kv.blocks.pool import BlockPool
from stoker.kv.blocks.transfer import OfferedBlock
from stoker.sched.sequence import Sequence


class Offers:
    """At most `max_offers` at a time, since what is being copied is free for nothing else; beyond them a block is not offered.
    Zero: there is no store."""

    def __init__(self, max_offers: int, pool: BlockPool) -> None:
        self._max_offers = max_offers
        self._pool = pool
        self._new: list[OfferedBlock] = []
        self._num_kept = 0

    def add(self, seq: Sequence, i: int) -> None:
        """Block `i` of the sequence."""
        if self._num_kept < self._max_offers:
            self._num_kept += 1
            self._pool.hold([seq.blocks[i]])
            self._new.append(OfferedBlock(seq.block_name(i), seq.blocks[i]))

    def take(self) -> list[OfferedBlock]:
        """Those that are new since."""
        new, self._new = self._new, []
        return new

    def end(self, blocks: Iterable[BlockId]) -> None:
        """Their bytes have been copied, or nobody wants them."""
        ended = list(blocks)
        self._num_kept -= len(ended)
        self._pool.release(ended)

"""EngineLeases: the engine's changes to the lease books of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stoker.engine.ranks.rank_kv import OtherKv
from stoker.kv.peer.lease_book import LeaseBook
from stoker.sched.leases import LeasedKv


class EngineLeases:
    """Writes the lease book of this rank and those of the others."""

    def __init__(self, book: LeaseBook, others: OtherKv) -> None:
        self._book, self._others = book, others

    def put(self, leased: Sequence[LeasedKv]) -> None:
        """Set the state of leases."""
        for kv in leased:
            self._book.put(kv.lease_id, kv.keys, kv.blocks, kv.num_ready, kv.complete, kv.names, kv.kv_set)
        self._others.put_leases(leased)

    def empty(self, lease_ids: Iterable[str]) -> None:
        """Withdraw the blocks of leases that are open."""
        self.put([LeasedKv(lease_id, [], [], [], 0, False) for lease_id in lease_ids if lease_id in self._book])

    def close(self, lease_ids: Iterable[str]) -> list[str]:
        """Close leases. Return those that no peer can read on any rank. Call it again for the others."""
        elsewhere = self._others.close_leases(lease_ids)
        return [lease_id for lease_id in lease_ids if self._book.close(lease_id) and lease_id in elsewhere]

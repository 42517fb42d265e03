"""Leases: the KV of sequences that somebody continues elsewhere, until it is pulled or its time is over. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.base.errors import InvalidRequest
from stoker.base.ids import BlockId, BlockKey
from stoker.kv.blocks.pool import BlockPool
from stoker.kv.blocks.transfer import BlockName, KvTicket
from stoker.sched.sequence import Sequence, State


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """What this engine promises with a ticket."""

    engine_id: str
    address: str
    lease_s: float

    def ticket(self, lease_id: str, num_tokens: int) -> KvTicket:
        return KvTicket(self.engine_id, self.address, lease_id, num_tokens, self.lease_s)


@dataclass(frozen=True, slots=True)
class LeasedKv:
    """The KV of a sequence that somebody may pull: `num_ready` leading blocks are final. The last key may be that of an
    unfilled block; `names` are of the full ones that are ready."""

    lease_id: str
    keys: list[BlockKey]
    blocks: list[BlockId]
    names: list[BlockName]
    num_ready: int
    complete: bool


class Leases:
    """A lease is *growing* while its sequence runs and *held* after: its blocks then have no other owner. One whose sequence
    ends in any other way is *broken*."""

    def __init__(self, terms: LeaseTerms | None, pool: BlockPool) -> None:
        self._terms = terms  # None: no KV is kept for others
        self._lease_s = terms.lease_s if terms is not None else 0.0
        self._pool = pool
        self._growing: dict[str, Sequence] = {}
        self._held: dict[str, list[BlockId]] = {}
        self._ends_s: dict[str, float] = {}  # of the held ones
        self._completed: list[LeasedKv] = []  # since they were last asked for
        self._broken: list[str] = []  # since they were last asked for
        self._bare: list[str] = []  # since they were last asked for

    @property
    def num_held(self) -> int:
        return len(self._held)

    def open(self, lease_id: str, seq: Sequence) -> None:
        if self._terms is None:
            raise InvalidRequest("this engine keeps no KV for others", code="no_handoff")
        if lease_id in self._growing or lease_id in self._held:
            raise InvalidRequest(f"lease {lease_id} is in use", code="duplicate_lease")
        self._growing[lease_id] = seq

    def keep(self, lease_id: str, seq: Sequence) -> KvTicket:
        """The sequence has drawn its token, and its blocks shall outlive it; those beyond its KV do not."""
        assert self._terms is not None, f"lease {lease_id} was never opened"
        # The token just drawn has no KV yet: whoever goes on computes it.
        ticket = self._terms.ticket(lease_id, len(seq.token_ids) - 1)
        if seq.state is State.RUNNING:  # else it was preempted with its last step under way: nothing is left to keep
            self._held[lease_id] = seq.blocks[: seq.num_blocks_for(ticket.num_tokens)]
            self._pool.hold(self._held[lease_id])
            self._completed.append(_kv_of(lease_id, self._growing.pop(lease_id), complete=True))
        return ticket

    def gave_back(self, lease_id: str) -> None:
        """The sequence gives its blocks back. Of no effect once its KV is kept."""
        if lease_id in self._growing:
            self._bare.append(lease_id)

    def take_bare(self) -> list[str]:
        """Leases that lost their KV."""
        bare, self._bare = self._bare, []
        return bare

    def left(self, lease_id: str) -> None:
        """The sequence is gone."""
        if self._growing.pop(lease_id, None) is not None:
            self._broken.append(lease_id)

    def take(self) -> tuple[list[LeasedKv], list[str]]:
        """The KV that is new or still growing, and the leases that came to nothing."""
        told = [_kv_of(lease_id, seq, complete=False) for lease_id, seq in self._growing.items()]
        told += self._completed
        broken, self._completed, self._broken = self._broken, [], []
        return told, broken

    def due(self, now: float) -> list[str]:
        """Leases that have ended. A lease begins when this is first asked after its KV was kept."""
        for lease_id in self._held:
            self._ends_s.setdefault(lease_id, now + self._lease_s)
        return [lease_id for lease_id, end_s in self._ends_s.items() if end_s <= now]

    def release(self, lease_id: str) -> None:
        """Nobody will pull it any more. Of no effect while its sequence still runs."""
        self._ends_s.pop(lease_id, None)
        self._pool.release(self._held.pop(lease_id, []))


def _kv_of(lease_id: str, seq: Sequence, complete: bool) -> LeasedKv:
    num_full, num_tokens = min(seq.num_named, len(seq.blocks)), len(seq.token_ids) - 1
    keys, blocks = seq.keys[:num_full], seq.blocks[:num_full]
    names = [seq.block_name(i) for i in range(num_full)]
    if complete and num_tokens > num_full * seq.block_tokens:
        keys.append(seq.key_up_to(num_tokens))
        blocks.append(seq.blocks[num_full])
    return LeasedKv(lease_id, keys, blocks, names, len(blocks), complete)

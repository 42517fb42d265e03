"""Leases: KV held for another worker that continues the sequence, until it is pulled or the lease expires. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.base.errors import InvalidRequest
from stoker.base.ids import BlockId, BlockKey
from stoker.kv.blocks.transfer import BlockName, KvTicket
from stoker.sched.block_sets import BlockSets
from stoker.sched.loads import first_leased
from stoker.sched.sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """The fixed part of this engine's tickets: its id, the address to pull from, and the duration of a lease."""

    engine_id: str
    address: str
    lease_s: float

    def ticket(self, lease_id: str, num_tokens: int) -> KvTicket:
        return KvTicket(self.engine_id, self.address, lease_id, num_tokens, self.lease_s)


@dataclass(frozen=True, slots=True)
class LeasedKv:
    """The KV of one lease in one KV set. Its first `num_ready` blocks are final and can be pulled.

    The last key may be that of a partly filled block. `names` covers the full blocks that are ready. In a set with a
    bounded reach, a lease has blocks only once it is complete: those that the next token sees.
    """

    lease_id: str
    keys: list[BlockKey]
    blocks: list[BlockId]
    names: list[BlockName]
    num_ready: int
    complete: bool
    kv_set: int = 0


class Leases:
    """All leases of one scheduler.

    A lease is *growing* while its sequence runs. It is *held* after the sequence ended with a ticket: the lease then
    owns the blocks. It is *broken* if the sequence ended in any other way.
    """

    def __init__(self, terms: LeaseTerms | None, sets: BlockSets) -> None:
        self._terms = terms  # None: this engine holds no KV for other workers
        self._lease_s = terms.lease_s if terms is not None else 0.0
        self._pools = sets.pools
        self._growing: dict[str, Sequence] = {}
        self._held: dict[str, list[list[BlockId]]] = {}  # their blocks in each KV set
        self._ends_s: dict[str, float] = {}  # when the held leases expire
        # Changes since the last call of take() or take_emptied():
        self._completed: list[LeasedKv] = []
        self._broken: list[str] = []
        self._emptied: list[str] = []

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def can_hold(self) -> bool:
        """False if this engine holds no KV for other workers."""
        return self._terms is not None

    def open(self, lease_id: str, seq: Sequence) -> None:
        """Start a growing lease on the sequence's KV. Raises InvalidRequest if the engine holds no leases or the id is
        used."""
        if self._terms is None:
            raise InvalidRequest("this engine holds no KV for other workers", code="no_handoff")
        if lease_id in self._growing or lease_id in self._held:
            raise InvalidRequest(f"lease {lease_id} is in use", code="duplicate_lease")
        self._growing[lease_id] = seq

    def hold(self, lease_id: str, seq: Sequence) -> KvTicket:
        """Keep the blocks that hold the sequence's KV after the sequence ends. Return the ticket for them."""
        assert self._terms is not None, f"lease {lease_id} was never opened"
        # The token that was just sampled has no KV yet. The worker that continues computes it.
        ticket = self._terms.ticket(lease_id, len(seq.token_ids) - 1)
        if seq.state is SequenceState.RUNNING:  # otherwise it was preempted during its last step and has no blocks
            self._hold(lease_id, self._growing.pop(lease_id), len(seq.token_ids) - 1)
        return ticket

    def take_over(self, lease_id: str, seq: Sequence, num_tokens: int) -> KvTicket | None:
        """Keep the KV of the first `num_tokens` tokens of a sequence that another worker continues.

        Return the ticket for it, or None if the id is used.
        """
        assert self._terms is not None, f"lease {lease_id} cannot be held here"
        if lease_id in self._growing or lease_id in self._held:
            return None
        self._hold(lease_id, seq, num_tokens)
        return self._terms.ticket(lease_id, num_tokens)

    def _hold(self, lease_id: str, seq: Sequence, num_tokens: int) -> None:
        completed = self._kv_of(lease_id, seq, num_tokens, complete=True)
        self._held[lease_id] = [kv.blocks for kv in completed]
        for pool, kv in zip(self._pools, completed, strict=True):
            pool.hold(kv.blocks)
        self._completed += completed

    def blocks_released(self, lease_id: str) -> None:
        """Record that the sequence gives its blocks back to the pool. A held lease keeps its own references."""
        if lease_id in self._growing:
            self._emptied.append(lease_id)

    def take_emptied(self) -> list[str]:
        """Return the growing leases that lost their blocks since the last call."""
        emptied, self._emptied = self._emptied, []
        return emptied

    def sequence_ended(self, lease_id: str) -> None:
        """Mark the lease as broken, unless it is held."""
        if self._growing.pop(lease_id, None) is not None:
            self._broken.append(lease_id)

    def take(self) -> tuple[list[LeasedKv], list[str]]:
        """Return the KV of all growing and newly held leases, and the ids of leases that broke since the last call."""
        kv = [
            part
            for lease_id, seq in self._growing.items()
            for part in self._kv_of(lease_id, seq, len(seq.token_ids) - 1, complete=False)
        ]
        kv += self._completed
        broken, self._completed, self._broken = self._broken, [], []
        return kv, broken

    def expired(self, now: float) -> list[str]:
        """Return the held leases whose time is over. A lease's time starts at the first call after it was held."""
        for lease_id in self._held:
            self._ends_s.setdefault(lease_id, now + self._lease_s)
        return [lease_id for lease_id, end_s in self._ends_s.items() if end_s <= now]

    def release(self, lease_id: str) -> None:
        """Give the blocks of a held lease back to the pool. Does nothing while its sequence still runs."""
        self._ends_s.pop(lease_id, None)
        for pool, blocks in zip(self._pools, self._held.pop(lease_id, []), strict=False):
            pool.release(blocks)

    def _kv_of(self, lease_id: str, seq: Sequence, num_tokens: int, complete: bool) -> list[LeasedKv]:
        """Return the KV of the first `num_tokens` tokens in each KV set that has some."""
        num_full = seq.num_named if seq.held else 0
        keys = seq.keys[:num_full]
        if complete and num_tokens > num_full * seq.block_tokens:
            keys.append(seq.key_up_to(num_tokens))
        parts = []
        for kv_set, pool in enumerate(self._pools):
            if pool.reach.is_bounded and not complete:
                continue
            first = first_leased(pool.reach, num_tokens, seq.block_tokens)
            names = [seq.block_name(i) for i in range(first, num_full)]
            blocks = seq.held[kv_set].between(first, len(keys)) if seq.held else []
            parts.append(LeasedKv(lease_id, keys[first:], blocks, names, len(blocks), complete, kv_set))
        return parts

"""LeaseBook: which blocks of this engine are kept for whom. The engine's thread writes it, the KV server's threads read it.

A lease says where the KV of one sequence lies, how many of its leading blocks are final, and whether more will come. It never
touches bytes. A preemption may move a lease to other blocks: each place has a number of its own (`generation`), and whoever
read bytes asks afterwards whether that place still held.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from stoker.base.ids import BlockId, BlockKey
from stoker.kv.blocks.transfer import BlockName, PeerUnavailable

_CLOSED_KEPT = 16_384  # ids of closed leases that are remembered, so that nobody waits for one of them to open


@dataclass(frozen=True, slots=True)
class LeaseView:
    """What a lease had to offer from `first` on at one moment."""

    generation: int
    blocks: list[BlockId]  # ready; of the keys asked for, or all
    names: list[BlockName]  # of those of them that are full, as far as known
    num_ready: int  # of the whole lease
    complete: bool
    checksums: list[int] = field(default_factory=list)  # of the first of them, as far as made: of whole blocks


@dataclass(frozen=True, slots=True)
class UncheckedBlocks:
    """Ready blocks of a lease, from its block `first` on, whose checksums nobody has made."""

    lease_id: str
    generation: int
    first: int
    blocks: list[BlockId]


@dataclass(slots=True, eq=False)
class _Lease:
    keys: list[BlockKey] = field(default_factory=list)
    blocks: list[BlockId] = field(default_factory=list)
    names: list[BlockName] = field(default_factory=list)
    num_ready: int = 0
    complete: bool = False
    generation: int = 0  # from 1 on once it is put anywhere
    checksums: list[int] = field(default_factory=list)  # of leading blocks, in this generation
    readers: int = 0
    closing: bool = False


@dataclass(slots=True, eq=False)
class LeaseBook:
    _leases: dict[str, _Lease] = field(default_factory=dict)
    _closed: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _generation: int = 0

    def put(
        self,
        lease_id: str,
        keys: Sequence[BlockKey],
        blocks: Sequence[BlockId],
        num_ready: int,
        complete: bool,
        names: Sequence[BlockName] = (),
    ) -> None:
        """The lease as it is now: it opens, more of it is ready, or, after a preemption, its KV lies in other blocks, or less of it
        is there. Keys and blocks of all of the sequence's KV, also of the unfilled last block, whose key is the last.
        `num_ready`: leading blocks whose bytes are final, on the device too. `names`: of its leading full blocks, for
        read-ahead."""
        with self._changed:
            lease = self._leases.get(lease_id)
            if lease is None:
                self._closed.pop(lease_id, None)
                lease = self._leases[lease_id] = _Lease()
            held = lease.num_ready
            was, now = (lease.keys[:held], lease.blocks[:held]), (list(keys[:held]), list(blocks[:held]))
            if lease.generation == 0 or num_ready < held or was != now:
                self._generation += 1
                lease.generation, lease.checksums = self._generation, []
            lease.keys, lease.blocks, lease.names = list(keys), list(blocks), list(names)
            lease.num_ready, lease.complete = num_ready, complete
            self._changed.notify_all()

    def close(self, lease_id: str) -> bool:
        """True: nobody can read it any more, its blocks may be used again. False: a server thread reads a block of it right
        now; no further read begins; try again later."""
        with self._changed:
            lease = self._leases.get(lease_id)
            if lease is None:
                return True
            lease.closing = True
            self._changed.notify_all()
            if lease.readers:
                return False
            del self._leases[lease_id]
            self._closed[lease_id] = None
            while len(self._closed) > _CLOSED_KEPT:
                self._closed.popitem(last=False)
            return True

    def __len__(self) -> int:
        with self._changed:
            return len(self._leases)

    def __contains__(self, lease_id: str) -> bool:
        with self._changed:
            return lease_id in self._leases

    def look(
        self, lease_id: str, first: int, keys: Sequence[BlockKey] | None, limit: int, wait_s: float = 0.0
    ) -> LeaseView:
        """Up to `limit` ready blocks from `first` on. With `keys`: they must be the lease's, as far as those are final. Waits
        for the first of them to be ready, and for the lease to open; comes back with none where the lease is complete or
        the time is over. PeerUnavailable: the lease is closed or not there, or has other keys."""
        until = time.monotonic() + wait_s
        with self._changed:
            while True:
                lease = self._lease(lease_id)
                if lease is not None:
                    if keys is not None:
                        final = len(lease.keys) if lease.complete else lease.num_ready
                        _check_keys(lease_id, lease.keys[first : min(final, first + len(keys))], keys)
                    if lease.num_ready > first or lease.complete:
                        return _view(lease, first, limit if keys is None else min(limit, len(keys)))
                left = until - time.monotonic()
                if left <= 0:
                    if lease is None:
                        raise PeerUnavailable(f"no lease {lease_id!r}", code="kv_lease_unknown")
                    return _view(lease, first, 0)
                self._changed.wait(left)

    def next_unchecked(self, limit: int, wait_s: float) -> UncheckedBlocks | None:
        """Of any lease. Where there are none it waits for a change, whatever it brings."""
        with self._changed:
            found = self._next_unchecked(limit)
            if found is None and self._changed.wait(wait_s):
                found = self._next_unchecked(limit)
            return found

    def wake(self) -> None:
        """Whoever waits looks again."""
        with self._changed:
            self._changed.notify_all()

    def set_checksums(self, what: UncheckedBlocks, checksums: Sequence[int]) -> None:
        """Nothing, where the lease has ended or moved since: the bytes may have been others."""
        with self._changed:
            lease = self._leases.get(what.lease_id)
            if lease is not None and lease.generation == what.generation and len(lease.checksums) == what.first:
                lease.checksums += checksums

    def holds(self, lease_id: str, generation: int) -> bool:
        """Whether what was read from this place since it was looked up is what the lease said."""
        with self._changed:
            lease = self._leases.get(lease_id)
            return lease is not None and lease.generation == generation and not lease.closing

    @contextmanager
    def reading(self, lease_id: str, generation: int) -> Iterator[bool]:
        """For the time that it takes to read one block: False where that place no longer holds, else the lease is not
        closed meanwhile."""
        with self._changed:
            lease = self._leases.get(lease_id)
            if lease is None or lease.generation != generation or lease.closing:
                lease = None
            else:
                lease.readers += 1
        try:
            yield lease is not None
        finally:
            if lease is not None:
                with self._changed:
                    lease.readers -= 1

    def _next_unchecked(self, limit: int) -> UncheckedBlocks | None:
        for lease_id, lease in self._leases.items():
            first = len(lease.checksums)
            if first < lease.num_ready and not lease.closing:
                blocks = lease.blocks[first : min(lease.num_ready, first + limit)]
                return UncheckedBlocks(lease_id, lease.generation, first, blocks)
        return None

    def _lease(self, lease_id: str) -> _Lease | None:
        lease = self._leases.get(lease_id)
        if lease_id in self._closed or (lease is not None and lease.closing):
            raise PeerUnavailable(f"lease {lease_id!r} is closed", code="kv_lease_closed")
        return lease


def _view(lease: _Lease, first: int, limit: int) -> LeaseView:
    end = min(lease.num_ready, first + limit)
    return LeaseView(
        lease.generation,
        lease.blocks[first:end],
        lease.names[first:end],
        lease.num_ready,
        lease.complete,
        lease.checksums[first:end],
    )


def _check_keys(lease_id: str, ours: list[BlockKey], asked: Sequence[BlockKey]) -> None:
    for at, (mine, theirs) in enumerate(zip(ours, asked, strict=False)):
        if mine != theirs:
            raise PeerUnavailable(
                f"lease {lease_id!r} has other keys: {mine.hex()} where {theirs.hex()} was asked for, {at} blocks on",
                code="kv_keys_differ",
            )

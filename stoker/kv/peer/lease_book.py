"""LeaseBook: which blocks of this engine are kept for which leases. The engine's thread writes it, and the KV server's
threads read it.

A lease says where the KV of one sequence is, how many of its leading blocks are final, and whether more will follow. It
has a part for each KV set. The book never touches bytes. A preemption may move a lease to other blocks. Each placement
has its own number (`generation`), and a reader checks afterwards that the placement did not change while it read.
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

_CLOSED_KEPT = 16_384  # remembered ids of closed leases, so that no reader waits for one of them to open


@dataclass(frozen=True, slots=True)
class LeaseView:
    """What a lease offered from block `first` on at one moment."""

    generation: int
    blocks: list[BlockId]  # ready blocks: those of the requested keys, or all
    names: list[BlockName]  # names of the full blocks among them, as far as known
    num_ready: int  # ready blocks of the whole lease
    complete: bool
    # checksums of the first of them, as far as computed, of whole blocks
    checksums: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class UncheckedBlocks:
    """Ready blocks of a lease in one KV set, from its block `first` on, that have no checksums yet."""

    lease_id: str
    kv_set: int
    generation: int
    first: int
    blocks: list[BlockId]


@dataclass(slots=True, eq=False)
class _LeasePart:
    """What a lease has in one KV set."""

    keys: list[BlockKey] = field(default_factory=list)
    blocks: list[BlockId] = field(default_factory=list)
    names: list[BlockName] = field(default_factory=list)
    num_ready: int = 0
    complete: bool = False
    generation: int = 0  # at least 1 once the lease has blocks
    checksums: list[int] = field(default_factory=list)  # of the leading blocks, in this generation


@dataclass(slots=True, eq=False)
class _Lease:
    parts: dict[int, _LeasePart] = field(default_factory=dict)  # by KV set
    readers: int = 0
    closing: bool = False

    def has(self, generation: int) -> bool:
        """Return True if a part has this placement. Generations are unique in the book."""
        return not self.closing and any(part.generation == generation for part in self.parts.values())


@dataclass(slots=True, eq=False)
class LeaseBook:
    """All open leases. Thread-safe."""

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
        kv_set: int = 0,
    ) -> None:
        """Set the current state of a lease in a KV set: it opens, more of it is ready, or a preemption has moved or
        shortened it.

        `keys` and `blocks` cover all KV of the sequence, including a partly filled last block, whose key is the last.
        `num_ready`: leading blocks whose bytes are final, on the device too. `names`: of the leading full blocks, for
        read-ahead.
        """
        with self._changed:
            lease = self._leases.get(lease_id)
            if lease is None:
                self._closed.pop(lease_id, None)
                lease = self._leases[lease_id] = _Lease()
            part = lease.parts.setdefault(kv_set, _LeasePart())
            held = part.num_ready
            was, now = (part.keys[:held], part.blocks[:held]), (list(keys[:held]), list(blocks[:held]))
            if part.generation == 0 or num_ready < held or was != now:
                self._generation += 1
                part.generation, part.checksums = self._generation, []
            part.keys, part.blocks, part.names = list(keys), list(blocks), list(names)
            part.num_ready, part.complete = num_ready, complete
            self._changed.notify_all()

    def close(self, lease_id: str) -> bool:
        """Close a lease. True: no reader can access it, and its blocks may be reused. False: a server thread is reading
        one of its blocks; no further read begins, and the caller tries again later."""
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

    def view(
        self,
        lease_id: str,
        first: int,
        keys: Sequence[BlockKey] | None,
        limit: int,
        wait_s: float = 0.0,
        kv_set: int = 0,
    ) -> LeaseView:
        """Return up to `limit` ready blocks of a KV set from `first` on.

        With `keys`, they must equal the lease's keys as far as those are final. Waits up to `wait_s` for the first of
        these blocks to be ready, and for the lease to open. Returns no blocks if the lease is complete or the time is
        over. Raises PeerUnavailable if the lease is closed, does not exist or has other keys.
        """
        until = time.monotonic() + wait_s
        with self._changed:
            while True:
                part = self._part(lease_id, kv_set)
                if part is not None:
                    if keys is not None:
                        final = len(part.keys) if part.complete else part.num_ready
                        _check_keys(lease_id, part.keys[first : min(final, first + len(keys))], keys)
                    if part.num_ready > first or part.complete:
                        return _view(part, first, limit if keys is None else min(limit, len(keys)))
                left = until - time.monotonic()
                if left <= 0:
                    if part is None:
                        raise PeerUnavailable(f"no lease {lease_id!r}", code="kv_lease_unknown")
                    return _view(part, first, 0)
                self._changed.wait(left)

    def next_unchecked(self, limit: int, wait_s: float) -> UncheckedBlocks | None:
        """Return ready blocks of any lease that have no checksums yet. If there are none, wait for one change of the
        book."""
        with self._changed:
            found = self._next_unchecked(limit)
            if found is None and self._changed.wait(wait_s):
                found = self._next_unchecked(limit)
            return found

    def wake(self) -> None:
        """Wake all waiting threads."""
        with self._changed:
            self._changed.notify_all()

    def set_checksums(self, unchecked: UncheckedBlocks, checksums: Sequence[int]) -> None:
        """Store checksums, unless the lease has ended or moved since, because the bytes may have been others."""
        with self._changed:
            lease = self._leases.get(unchecked.lease_id)
            part = None if lease is None else lease.parts.get(unchecked.kv_set)
            if part is not None and part.generation == unchecked.generation and len(part.checksums) == unchecked.first:
                part.checksums += checksums

    def holds(self, lease_id: str, generation: int) -> bool:
        """Return True if the lease still has the placement of this generation."""
        with self._changed:
            lease = self._leases.get(lease_id)
            return lease is not None and lease.has(generation)

    @contextmanager
    def reading(self, lease_id: str, generation: int) -> Iterator[bool]:
        """Keep the lease from being closed while one block is read. Yields False if the lease no longer has this
        placement."""
        with self._changed:
            lease = self._leases.get(lease_id)
            if lease is None or not lease.has(generation):
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
            for kv_set, part in lease.parts.items():
                first = len(part.checksums)
                if first < part.num_ready and not lease.closing:
                    blocks = part.blocks[first : min(part.num_ready, first + limit)]
                    return UncheckedBlocks(lease_id, kv_set, part.generation, first, blocks)
        return None

    def _part(self, lease_id: str, kv_set: int) -> _LeasePart | None:
        lease = self._leases.get(lease_id)
        if lease_id in self._closed or (lease is not None and lease.closing):
            raise PeerUnavailable(f"lease {lease_id!r} is closed", code="kv_lease_closed")
        return None if lease is None else lease.parts.get(kv_set)


def _view(part: _LeasePart, first: int, limit: int) -> LeaseView:
    end = min(part.num_ready, first + limit)
    return LeaseView(
        part.generation,
        part.blocks[first:end],
        part.names[first:end],
        part.num_ready,
        part.complete,
        part.checksums[first:end],
    )


def _check_keys(lease_id: str, ours: list[BlockKey], requested: Sequence[BlockKey]) -> None:
    for i, (held, wanted) in enumerate(zip(ours, requested, strict=False)):
        if held != wanted:
            raise PeerUnavailable(
                f"lease {lease_id!r} has other keys: block {i} of the request is {wanted.hex()}, the lease has {held.hex()}",
                code="kv_keys_differ",
            )

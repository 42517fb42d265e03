"""Loader: fills blocks from tiers and from another worker, on the store's threads.

A load ends by its deadline with the leading blocks that arrived. RAM is read directly into the blocks. A source that
can hang is read into buffers, and the read is abandoned if it hangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from stoker.base import log as logs
from stoker.base.ids import BlockId, BlockKey
from stoker.kv.blocks.transfer import BlockName, KvLoad, KvTicket, LocalLoad, PeerUnavailable, TierUnavailable
from stoker.kv.store.block_io import BlockIo, HostBytes
from stoker.kv.store.bounded_reader import BoundedReader
from stoker.kv.store.buffer_pool import BufferPool
from stoker.kv.store.measured_tier import MeasuredTier, first_holders
from stoker.kv.store.speed import Speed

IN_RAM = "CPU"

_BATCH_BLOCKS = 16  # blocks per read; the deadline is checked between reads
_GUESS_PEER_BYTES_PER_S = 1e9
# The timeout of a load is _TIMEOUT_FACTOR times the expected time plus a constant, or a share of the time that
# computing would take, whichever is longer. From a tier, loading must not delay an answer much more than computing
# would. From a peer, the blocks exist, and computing them again would delay all sequences that decode here; a dead peer
# is detected in other ways.
_TIMEOUT_FACTOR = 3.0
_TIER_GRACE_S, _TIER_COMPUTE_SHARE = 0.05, 0.05
_PEER_GRACE_S, _PEER_COMPUTE_SHARE = 1.0, 1.0
_PEER = "peer"

log = logs.EventLog("kv")


class Peers(Protocol):
    """The client that pulls blocks from other workers (PeerClient)."""

    def pull(
        self,
        ticket: KvTicket,
        first_index: int,
        keys: Sequence[BlockKey],
        into: Sequence[BlockId],
        deadline_s: float,
        kv_set: int = 0,
    ) -> list[bool]: ...

    def read_ahead(
        self,
        ticket: KvTicket,
        into: Callable[[list[BlockName], list[HostBytes]], None],
        deadline_s: float,
        kv_set: int = 0,
    ) -> int: ...

    def release(self, ticket: KvTicket) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadedBlocks:
    """What a load brought in one KV set: `num_loaded` leading blocks, `num_pulled` of them from the ticket's worker."""

    num_loaded: int
    num_pulled: int
    complete: bool


class Loader:
    """Decides where each block of a load comes from, and reads it, for one KV set. `compute_s(num_blocks)` is how long
    computing them would take."""

    def __init__(
        self,
        tiers: Sequence[MeasuredTier],
        peers: Peers,
        io: BlockIo,
        buffers: BufferPool,
        bounded_reader: BoundedReader,
        block_bytes: int,
        compute_s: Callable[[int], float],
        kv_set: int = 0,
    ) -> None:
        self._kv_set = kv_set
        self._pull_speed = Speed(_GUESS_PEER_BYTES_PER_S)
        self._tiers = tiers
        self._peers = peers
        self._io = io
        self._buffers = buffers
        self._block_bytes = block_bytes
        self._compute_s = compute_s
        self._bounded_reader = bounded_reader

    def load(self, wanted: KvLoad | LocalLoad, ticket: KvTicket | None) -> LoadedBlocks:
        """Fill the blocks of a load in this KV set. Blocks until done."""
        sources: list[str | None] = [None] * len(wanted.keys)
        if sources:
            self._fill(wanted, ticket, sources)
        num_loaded = next((i for i, source in enumerate(sources) if source is None), len(sources))
        return LoadedBlocks(num_loaded, sources[:num_loaded].count(_PEER), num_loaded == len(sources))

    def is_worth(self, tier: MeasuredTier) -> bool:
        """Return True if reading a block from this tier is faster than computing it."""
        return tier.speed.seconds(self._block_bytes) <= self._compute_s(1)

    def _fill(self, wanted: KvLoad | LocalLoad, ticket: KvTicket | None, sources: list[str | None]) -> None:
        # A tier that hangs is not worth reading, so it must not raise the expected time.
        holders = first_holders([tier for tier in self._tiers if self.is_worth(tier)], wanted.keys)
        deadline_s = time.monotonic() + self._timeout_s(holders, ticket is not None)
        pulls_first = self._pulls_are_faster(holders)
        if ticket is not None and pulls_first:
            elsewhere = [i for i, tier in enumerate(holders) if tier is None or tier.backend.medium != IN_RAM]
            self._pull(wanted, ticket, sources, elsewhere, deadline_s)
        for tier in self._tiers:
            indices = [i for i, holder in enumerate(holders) if holder is tier and sources[i] is None]
            self._read(tier, wanted, sources, indices, deadline_s)
        if ticket is not None and not pulls_first:
            self._pull(wanted, ticket, sources, list(range(len(sources))), deadline_s)

    def _timeout_s(self, holders: Sequence[MeasuredTier | None], may_pull: bool) -> float:
        """Return how long a load may take."""
        expected_s = sum(tier.speed.seconds(self._block_bytes) for tier in holders if tier is not None)
        if may_pull:
            expected_s += self._pull_speed.seconds(holders.count(None) * self._block_bytes)
        grace_s, share = (_PEER_GRACE_S, _PEER_COMPUTE_SHARE) if may_pull else (_TIER_GRACE_S, _TIER_COMPUTE_SHARE)
        return max(_TIMEOUT_FACTOR * expected_s + grace_s, share * self._compute_s(len(holders)))

    def _pulls_are_faster(self, holders: Sequence[MeasuredTier | None]) -> bool:
        """Return True if pulling from the peer is faster than the slowest tier that holds any of these blocks."""
        slowest = min((tier.speed.bytes_per_s for tier in holders if tier is not None), default=0.0)
        return self._pull_speed.bytes_per_s > slowest

    def _pull(
        self,
        wanted: KvLoad | LocalLoad,
        ticket: KvTicket,
        sources: list[str | None],
        indices: list[int],
        deadline_s: float,
    ) -> None:
        """Pull the missing blocks among `indices` from the ticket's worker."""
        for run in _runs([i for i in indices if sources[i] is None]):
            started_s = time.monotonic()
            keys, blocks = wanted.keys[run.start : run.stop], wanted.blocks[run.start : run.stop]
            try:
                arrived = self._peers.pull(ticket, wanted.first + run.start, keys, blocks, deadline_s, self._kv_set)
            except PeerUnavailable as error:
                log.warning("kv_pull_failed", lease=ticket.lease_id, peer=ticket.address, reason=error.message)
                return
            self._pull_speed.observe(sum(arrived) * self._block_bytes, time.monotonic() - started_s)
            for i, is_there in zip(run, arrived, strict=True):
                sources[i] = _PEER if is_there else None

    def _read(
        self,
        tier: MeasuredTier,
        wanted: KvLoad | LocalLoad,
        sources: list[str | None],
        indices: list[int],
        deadline_s: float,
    ) -> None:
        """Read blocks from one tier until the deadline."""
        for start in range(0, len(indices), _BATCH_BLOCKS):
            batch = indices[start : start + _BATCH_BLOCKS]
            keys, blocks = [wanted.keys[i] for i in batch], [wanted.blocks[i] for i in batch]
            own = self._own_buffers(blocks) if tier.backend.medium == IN_RAM else None
            try:
                if own is None:
                    right = self._read_bounded(tier, keys, blocks, deadline_s)
                else:
                    right = tier.read(keys, own)
            except TierUnavailable:
                return
            for i, is_right in zip(batch, right, strict=True):
                sources[i] = tier.name if is_right else None
            if time.monotonic() > deadline_s:
                return

    def _own_buffers(self, blocks: Sequence[BlockId]) -> list[HostBytes] | None:
        """Return the blocks themselves as buffers, or None if they cannot be written in place."""
        own = [buffer for block in blocks if (buffer := self._io.own_buffer(block)) is not None]
        return own if len(own) == len(blocks) else None

    def _read_bounded(
        self, tier: MeasuredTier, keys: list[BlockKey], blocks: list[BlockId], deadline_s: float
    ) -> list[bool]:
        """Read into buffers with a deadline, then copy the correct blocks to the device."""
        buffers, right = self._bounded_reader.read(tier, keys, deadline_s)
        good = [i for i, is_right in enumerate(right) if is_right]
        self._io.write([buffers[i] for i in good], [blocks[i] for i in good])
        self._buffers.give_back(buffers)
        return right


def _runs(indices: Sequence[int]) -> Iterator[range]:
    """Yield the ranges of consecutive indices."""
    start = 0
    for i in range(1, len(indices) + 1):
        if i == len(indices) or indices[i] != indices[i - 1] + 1:
            yield range(indices[start], indices[i - 1] + 1)
            start = i

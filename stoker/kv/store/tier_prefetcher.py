"""TierPrefetcher: moves blocks between tiers before a request needs them, one after the other, on a thread of its own.

It brings the blocks of a conversation that will continue into RAM, pulls a prefill worker's blocks while it still
computes, and refills a tier that has lost its blocks. All of these are hints: a failure is logged and has no other
effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from stoker.base import log as logs
from stoker.base.ids import BlockKey
from stoker.kv.blocks.transfer import BlockName, KvTicket, PeerUnavailable, TierUnavailable
from stoker.kv.device.checksum import checksum
from stoker.kv.store.block_io import HostBytes
from stoker.kv.store.bounded_reader import BoundedReader
from stoker.kv.store.buffer_pool import BufferPool
from stoker.kv.store.loader import IN_RAM, Peers
from stoker.kv.store.measured_tier import MeasuredTier, first_holders

_PULL_S = 60.0
_MOVE_S = 5.0  # deadline for reading one block, however slow the tier

log = logs.EventLog("kv")


class TierPrefetcher:
    """Runs the store's prefetch hints for one KV set."""

    def __init__(
        self,
        tiers: Sequence[MeasuredTier],
        peers: Peers,
        buffers: BufferPool,
        bounded_reader: BoundedReader,
        stored: Callable[[MeasuredTier, Sequence[BlockName]], None],
        kv_set: int = 0,
    ) -> None:
        self._kv_set = kv_set
        self._tiers = tiers
        self._peers = peers
        self._buffers = buffers
        self._bounded_reader = bounded_reader
        self._stored = stored
        self._ram = next((tier for tier in tiers if tier.backend.medium == IN_RAM), None)

    def promote(self, names: Sequence[BlockName]) -> None:
        """Copy the leading blocks that any tier holds into RAM."""
        if self._ram is None:
            return
        for name, holder in zip(names, first_holders(self._tiers, [name.key for name in names]), strict=True):
            if holder is None or (holder is not self._ram and not self._move(name, holder, self._ram)):
                return

    def pull(self, ticket: KvTicket) -> None:
        """Pull the full blocks of a lease into RAM as they become ready."""
        ram = self._ram
        if ram is None:
            return
        try:
            into = partial(self._write, to=ram)
            self._peers.read_ahead(ticket, into, time.monotonic() + _PULL_S, self._kv_set)
        except (PeerUnavailable, TierUnavailable) as error:
            log.event("kv_read_ahead_failed", lease=ticket.lease_id, reason=error.message)

    def offer_again(self, to: MeasuredTier, keys: Sequence[BlockKey]) -> None:
        """Write blocks that the tier `to` has lost into it again, from other tiers that still hold them."""
        wanted = set(keys)
        for tier in self._tiers:
            if tier is to:
                continue
            for name in tier.backend.names():
                if name.key in wanted:
                    wanted.discard(name.key)
                    if not self._move(name, tier, to):
                        break

    def _move(self, name: BlockName, src: MeasuredTier, dst: MeasuredTier) -> bool:
        """Copy one block. Returns False if one of the two tiers does not answer."""
        try:
            buffers, (is_right,) = self._bounded_reader.read(src, [name.key], time.monotonic() + _MOVE_S)
            try:
                if is_right:
                    self._write([name], buffers, dst)
            finally:
                self._buffers.give_back(buffers)
        except TierUnavailable as error:
            log.event("kv_move_failed", src=src.name, dst=dst.name, reason=error.message)
            return False
        return True

    def _write(self, names: list[BlockName], data: list[HostBytes], to: MeasuredTier) -> None:
        taken = to.write(names, data, [checksum(block) for block in data])
        self._stored(to, [name for name, is_there in zip(names, taken, strict=True) if is_there])

"""The contract of a transport: one way to copy blocks out of another worker's pool.

A transport has two sides. The side that holds the blocks makes an offer, which describes how to reach its pool. The
side that pulls opens the offer once per peer and gets a link. Leases, keys and checksums are the same for all
transports. A link either asks the server to send the bytes (tcp), or reads the peer's memory itself and asks afterwards
whether the lease was still valid (OneSidedLink).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from stoker.base.config import HandoffSettings
from stoker.base.ids import BlockId
from stoker.base.registry import Registry
from stoker.kv.blocks.layout import BlockSlice, KvLayout, block_slice
from stoker.kv.blocks.transfer import BlockName, PeerUnavailable
from stoker.kv.device.device_kv import SetKv
from stoker.kv.peer.block_bytes import BeforeWrite, BlockSink
from stoker.kv.peer.lease_book import LeaseView
from stoker.kv.peer.peer_wire import BlockReply, BlockRequest, FrameKind, PeerConnection, pack_confirm

IO_TIMEOUT_S = 5.0  # a peer that sends or accepts nothing for this long is given up
_REPLY_S = 0.25  # grace after the deadline: a peer that waited for blocks until then still replies that there are none


@dataclass(slots=True, eq=False)
class PullProgress:
    """A pull in progress: what is requested, and what arrived so far. Links update it as they go, so that blocks that
    arrived before a failure count."""

    sink: BlockSink
    filled: list[bool]
    until_s: float  # monotonic
    num_done: int = 0  # leading blocks that are done, successfully or not
    num_corrupt: int = 0
    names: list[BlockName] = field(default_factory=list)

    def timeout_s(self) -> float:
        """Return how long to wait for the next bytes of the peer. Raises PeerUnavailable if the deadline has passed."""
        left_s = self.until_s - time.monotonic()
        if left_s <= 0:
            raise PeerUnavailable("the deadline has passed", code="kv_pull_deadline")
        return min(IO_TIMEOUT_S, left_s)

    def reply_timeout_s(self, wait_s: float) -> float:
        """Return how long to wait for the reply of a peer that may itself wait for `wait_s`."""
        return min(wait_s + IO_TIMEOUT_S, self.timeout_s() + _REPLY_S)

    def record(self, right: bool, held: bool) -> None:
        """Record the next block. `right`: its checksum was correct. `held`: the lease kept its placement while it was
        read."""
        self.filled[self.num_done] = right and held
        # If the lease moved during the read, the bytes belong to another sequence and are not corrupt.
        self.num_corrupt += held and not right
        self.num_done += 1


class Link(Protocol):
    """An open connection to one peer's pool. Several threads may use it at a time, each with its own connection."""

    def supports(self, sink: BlockSink) -> bool:
        """Return True if the link can write into this sink."""

    def take(self, connection: PeerConnection, request: BlockRequest, pull: PullProgress) -> LeaseView:
        """Copy all ready blocks of the request, from `pull.num_done` on. The peer waits up to `request.wait_s` for the
        first one. Returns the peer's last view of the lease. After an error the connection must not be used again."""

    def close(self) -> None:
        """Release all resources."""


class Transport(Protocol):
    """One per server and client."""

    def offer(self, kv: SetKv) -> dict[str, Any]:
        """Describe the pool as JSON, on the side that holds the blocks. Raises PeerUnavailable if this transport cannot be
        used here."""

    def open(self, offer: dict[str, Any], peer: KvLayout, kv: SetKv, before_write: BeforeWrite) -> Link:
        """Open a link, on the side that pulls. Raises PeerUnavailable if this peer cannot be reached this way. The next
        transport is tried then."""

    def close(self) -> None:
        """Release all resources."""


class TransportFactory(Protocol):
    def __call__(self, argument: str, host: str) -> Transport:
        """Make the transport. `argument` is what follows its name in the settings: "rdma" in "mooncake:rdma". `host` is
        the address at which peers reach this worker."""


TRANSPORTS: Registry[TransportFactory] = Registry("transport", "stoker.kv.peer.transports")


def make_transports(settings: HandoffSettings) -> dict[str, Transport]:
    """Return the transports of the settings by name, in the order of preference."""
    entries = (entry.partition(":") for entry in settings.transports)
    return {name: TRANSPORTS.get(name, "--kv-transports")(argument, settings.host) for name, _, argument in entries}


class OneSidedLink(ABC):
    """A link that reads the peer's memory without its help. LOCATE returns where the blocks are and their checksums.
    CONFIRM returns whether the lease kept its placement until the bytes were copied. The next batch is located while
    this one is copied."""

    batch_bytes: ClassVar[tuple[int, int]] = (16 << 20, 64 << 20)
    """Size of the first batch, small so that both sides soon have work, and of the largest. Each batch is twice as
    large as the one before."""

    def __init__(self, peer: KvLayout) -> None:
        self._peer = peer

    @abstractmethod
    def copy(
        self, blocks: Sequence[BlockId], part: BlockSlice, checksums: Sequence[int], sink: BlockSink, first: int
    ) -> list[bool]:
        """Copy this slice of the peer's blocks into the sink, from its block `first` on. True: the checksum was
        correct."""

    def supports(self, sink: BlockSink) -> bool:
        return True

    def close(self) -> None:
        return

    def take(self, connection: PeerConnection, request: BlockRequest, pull: PullProgress) -> LeaseView:
        """See Link.take."""
        part = block_slice(self._peer, request.part(self._peer))
        least, most = (max(1, size // part.total_bytes) for size in self.batch_bytes)
        last = request.first + request.limit
        request = replace(request, limit=min(request.limit, least))
        connection.limit(pull.reply_timeout_s(request.wait_s), IO_TIMEOUT_S)
        connection.send(FrameKind.LOCATE, request.pack())
        reply = _located(connection)
        # Blocks whose CONFIRMED has not been received yet. It is received only after the next copy, so that copying
        # does not wait for it.
        copied: list[bool] = []
        while reply.view.blocks:
            view, end = reply.view, request.first + len(reply.view.blocks)
            pull.names += view.names
            connection.limit(pull.timeout_s(), IO_TIMEOUT_S)
            has_next = min(last, view.num_ready) > end
            following = _after(request, end, last, most)
            if has_next:
                connection.send(FrameKind.LOCATE, following.pack())
            right = self.copy(view.blocks, part, reply.checksums, pull.sink, pull.num_done + len(copied))
            _confirmed(connection, copied, pull)
            connection.send(FrameKind.CONFIRM, pack_confirm(request.lease_id, view.generation))
            copied = right
            if not has_next:
                _confirmed(connection, copied, pull)
                return view
            request, reply = following, _located(connection)
        _confirmed(connection, copied, pull)
        return reply.view


def _confirmed(connection: PeerConnection, copied: list[bool], pull: PullProgress) -> None:
    """Receive the peer's CONFIRMED for a batch, if there is one, and record its blocks. `copied`: which blocks had the
    right checksum."""
    if not copied:
        return
    held = connection.receive(FrameKind.CONFIRMED)[1] == b"\x01"
    for right in copied:
        pull.record(right, held)


def _after(request: BlockRequest, first: int, last: int, most: int) -> BlockRequest:
    keys = None if request.keys is None else request.keys[first - request.first :]
    return replace(request, first=first, keys=keys, limit=min(2 * request.limit, most, last - first), wait_s=0.0)


def _located(connection: PeerConnection) -> BlockReply:
    reply = BlockReply.unpack(connection.receive(FrameKind.LOCATED)[1])
    if len(reply.checksums) != len(reply.view.blocks):
        raise PeerUnavailable(f"{len(reply.checksums)} checksums for {len(reply.view.blocks)} blocks")
    return reply

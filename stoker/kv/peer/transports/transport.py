"""The contract of a transport: one way to take the bytes of blocks out of another worker's pool.

A transport has two sides. The one that holds the blocks makes an offer, which is whatever the other needs to reach its pool; the
one that pulls opens it once a peer and gets a link. Leases, keys and checksums are the same for all: a link either asks the
server for the bytes (tcp), or reads the peer's memory by itself and asks afterwards whether it might (OneSidedLink).
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
from stoker.kv.blocks.layout import HeadSlice, KvLayout, head_slice
from stoker.kv.blocks.transfer import BlockName, PeerUnavailable
from stoker.kv.device.device_kv import DeviceKv
from stoker.kv.peer.block_bytes import BeforeWrite, BlockSink
from stoker.kv.peer.lease_book import LeaseView
from stoker.kv.peer.peer_wire import BlockReply, BlockRequest, FrameKind, PeerConnection, pack_confirm

IO_S = 5.0  # that a peer may say nothing, or take nothing, before it is given up
_WORD_S = 0.25  # past the deadline: a peer that waits for blocks until then says that there are none


@dataclass(slots=True, eq=False)
class PullProgress:
    """A pull on its way: what is asked for, and what came so far. Links fill it in as they go, so that what came before a
    failure counts."""

    sink: BlockSink
    filled: list[bool]
    until_s: float  # monotonic
    at: int = 0  # blocks before this one are dealt with, well or not
    num_corrupt: int = 0
    names: list[BlockName] = field(default_factory=list)

    def patience_s(self) -> float:
        """How long to wait for the next sign of the peer. PeerUnavailable: the time is over."""
        left_s = self.until_s - time.monotonic()
        if left_s <= 0:
            raise PeerUnavailable("the deadline has passed", code="kv_pull_deadline")
        return min(IO_S, left_s)

    def answer_s(self, wait_s: float) -> float:
        """How long to wait for the answer of a peer that may itself wait for `wait_s`."""
        return min(wait_s + IO_S, self.patience_s() + _WORD_S)

    def took(self, right: bool, held: bool) -> None:
        """The next block came. `right`: its checksum; `held`: the lease, for as long as it was read."""
        self.filled[self.at] = right and held
        # Bytes of blocks that changed hands while they were read are not corrupt; they are somebody else's.
        self.num_corrupt += held and not right
        self.at += 1


class Link(Protocol):
    """An open way to one peer's pool. Several threads may use it at a time, each with a connection of its own."""

    def fits(self, sink: BlockSink) -> bool:
        """Whether it can bring bytes there."""

    def take(self, connection: PeerConnection, ask: BlockRequest, pull: PullProgress) -> LeaseView:
        """Take all that is ready of what is asked for, from `pull.at` on; the peer waits for the first of it, for at most
        `ask.wait_s`. Returns what the peer said last. After an error the connection is of no use any more."""

    def close(self) -> None: ...


class Transport(Protocol):
    """One for each server and client."""

    def offer(self, kv: DeviceKv) -> dict[str, Any]:
        """On the side that holds the blocks; JSON. PeerUnavailable: not this way, not here."""

    def open(self, offer: dict[str, Any], peer: KvLayout, kv: DeviceKv, before_write: BeforeWrite) -> Link:
        """On the side that pulls. PeerUnavailable: this peer cannot be reached this way; the next way is tried."""

    def close(self) -> None: ...


class TransportFactory(Protocol):
    def __call__(self, argument: str, host: str) -> Transport:
        """`argument`: what stands behind its name in the settings, "rdma" of "mooncake:rdma". `host`: where peers reach this
        worker."""


TRANSPORTS: Registry[TransportFactory] = Registry("transport", "stoker.kv.peer.transports")


def make_transports(settings: HandoffSettings) -> dict[str, Transport]:
    """By name, in the order of preference."""
    entries = (entry.partition(":") for entry in settings.transports)
    return {name: TRANSPORTS.get(name)(argument, settings.host) for name, _, argument in entries}


class OneSidedLink(ABC):
    """Reads the peer's memory without its help: LOCATE says where and with which checksums, CONFIRM whether the lease held
    until the bytes were copied. The next batch is located while this one is copied."""

    batch_bytes: ClassVar[tuple[int, int]] = (16 << 20, 64 << 20)
    """Located at one time: at first, so that both sides soon have work, and at most. Each next batch is twice as large."""

    def __init__(self, peer: KvLayout) -> None:
        self._peer = peer

    @abstractmethod
    def copy(
        self, blocks: Sequence[BlockId], part: HeadSlice, checksums: Sequence[int], sink: BlockSink, first: int
    ) -> list[bool]:
        """This part of the peer's blocks into the sink, from its block `first` on. True: with this checksum."""

    def fits(self, sink: BlockSink) -> bool:
        return True

    def close(self) -> None:
        return

    def take(self, connection: PeerConnection, ask: BlockRequest, pull: PullProgress) -> LeaseView:
        part = head_slice(self._peer, ask.first_head, ask.end_head)
        least, most = (max(1, size // part.total_bytes) for size in self.batch_bytes)
        last = ask.first + ask.limit
        ask = replace(ask, limit=min(ask.limit, least))
        connection.limit(pull.answer_s(ask.wait_s), IO_S)
        connection.send(FrameKind.LOCATE, ask.pack())
        answer = _located(connection)
        copied: list[bool] = []  # whose CONFIRMED is still to come: nobody waits for it but at the end
        while answer.view.blocks:
            view, end = answer.view, ask.first + len(answer.view.blocks)
            pull.names += view.names
            connection.limit(pull.patience_s(), IO_S)
            has_next = min(last, view.num_ready) > end
            following = _after(ask, end, last, most)
            if has_next:
                connection.send(FrameKind.LOCATE, following.pack())
            right = self.copy(view.blocks, part, answer.checksums, pull.sink, pull.at + len(copied))
            _confirmed(connection, copied, pull)
            connection.send(FrameKind.CONFIRM, pack_confirm(ask.lease_id, view.generation))
            copied = right
            if not has_next:
                _confirmed(connection, copied, pull)
                return view
            ask, answer = following, _located(connection)
        _confirmed(connection, copied, pull)
        return answer.view


def _confirmed(connection: PeerConnection, copied: list[bool], pull: PullProgress) -> None:
    """`copied`, none or a batch: which of them came with the right checksum. The next thing that the peer says is whether the
    lease held."""
    if not copied:
        return
    held = connection.receive(FrameKind.CONFIRMED)[1] == b"\x01"
    for right in copied:
        pull.took(right, held)


def _after(ask: BlockRequest, first: int, last: int, most: int) -> BlockRequest:
    keys = None if ask.keys is None else ask.keys[first - ask.first :]
    return replace(ask, first=first, keys=keys, limit=min(2 * ask.limit, most, last - first), wait_s=0.0)


def _located(connection: PeerConnection) -> BlockReply:
    answer = BlockReply.unpack(connection.receive(FrameKind.LOCATED)[1])
    if len(answer.checksums) != len(answer.view.blocks):
        raise PeerUnavailable(f"{len(answer.checksums)} checksums for {len(answer.view.blocks)} blocks")
    return answer

"""TCP: the server sends the bytes on the connection that asked for them, each block with its checksum behind it."""

from __future__ import annotations

import time
from typing import Any

from stoker.kv.blocks.layout import KvLayout, part_of
from stoker.kv.device.checksum import PIECE_BYTES, HostBytes, RunningChecksum, piece_digest, total
from stoker.kv.device.device_kv import DeviceKv
from stoker.kv.peer.block_bytes import BeforeWrite, Sink, Source
from stoker.kv.peer.lease_book import LeaseBook, LeaseView
from stoker.kv.peer.peer_wire import TRAILER, Answer, Ask, Connection, Kind, PeerLost
from stoker.kv.peer.transports.transport import IO_S, TRANSPORTS, Pull

_BLOCK_S = 15.0  # that sending one block may take: a reader that is too slow must not keep a lease from being closed
_SEND_BYTES = 1 << 20
_FOLLOWS, _ENDED = b"\x01", b"\x00"  # before each block: a lease may end in the middle of an answer


@TRANSPORTS.register("tcp")
class TcpTransport:
    def __init__(self, argument: str, host: str) -> None:
        pass

    def offer(self, kv: DeviceKv) -> dict[str, Any]:
        return {}

    def open(self, offer: dict[str, Any], peer: KvLayout, kv: DeviceKv, before_write: BeforeWrite) -> TcpLink:
        return TcpLink()

    def close(self) -> None:
        pass


class TcpLink:
    def fits(self, sink: Sink) -> bool:
        return True

    def close(self) -> None:
        pass

    def take(self, connection: Connection, ask: Ask, pull: Pull) -> LeaseView:
        connection.limit(pull.answer_s(ask.wait_s), IO_S)
        connection.send(Kind.READ, ask.pack())
        view = Answer.unpack(connection.receive(Kind.DATA)[1]).view
        pull.names += view.names
        follows = connection.receive_bytes(1) if view.blocks else _ENDED
        for left in reversed(range(len(view.blocks))):
            if follows != _FOLLOWS:
                break
            found = _receive(connection, pull)
            # With what stands before the next block: one call less for each.
            end = connection.receive_bytes(TRAILER.size + (left > 0))
            (expected, held), follows = TRAILER.unpack_from(end), end[TRAILER.size :]
            if found == expected and held:
                pull.sink.place(pull.at)
            pull.took(found == expected, bool(held))
        return view


def _receive(connection: Connection, pull: Pull) -> int:
    """The next block's checksum: each piece is summed up while it is in the cache."""
    into = pull.sink.buffer(pull.at)
    digests = []
    for start in range(0, len(into), PIECE_BYTES):
        piece = into[start : start + PIECE_BYTES]
        connection.limit(pull.patience_s(), IO_S)
        connection.receive_into(piece.data)
        digests.append(piece_digest(piece))
    return total(digests, len(into))


def send_blocks(
    connection: Connection, source: Source, leases: LeaseBook, layout: KvLayout, ask: Ask, view: LeaseView
) -> int:
    """The server's side, after the DATA frame: how many blocks were sent."""
    part = part_of(layout, ask.first_head, ask.end_head)
    parts = source.host(view.blocks, part)
    connection.limit(IO_S, IO_S)
    num_blocks = len(view.blocks)
    sums = view.sums if part.total_bytes == layout.block_bytes else []
    for count in range(num_blocks):
        with leases.reading(ask.lease_id, view.generation) as may_read:
            if not may_read:
                connection.send_bytes(_ENDED)
                return count
            connection.send_bytes(_FOLLOWS, more=True)
            total = _send(connection, next(parts), sums[count] if count < len(sums) else None)
        # Asked once more: an update may have moved the lease while its bytes went out.
        held = leases.holds(ask.lease_id, view.generation)
        connection.send_bytes(TRAILER.pack(total, held), more=count + 1 < num_blocks)
    return num_blocks


def _send(connection: Connection, data: HostBytes, known: int | None) -> int:
    running, until_s = RunningChecksum(), time.monotonic() + _BLOCK_S
    step = PIECE_BYTES if known is None else _SEND_BYTES
    for start in range(0, len(data), step):
        part = data[start : start + step]
        if known is None:
            running.add(part)
        connection.send_bytes(part.data)
        if time.monotonic() > until_s:
            raise PeerLost(f"the peer takes too long: {start} of {len(data)} bytes in {_BLOCK_S} s")
    return running.value() if known is None else known

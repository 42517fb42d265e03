"""TCP: the server sends the blocks on the client's connection, each followed by its checksum."""

from __future__ import annotations

import time
from typing import Any

from stoker.kv.blocks.layout import KvLayout, block_slice
from stoker.kv.device.checksum import PIECE_BYTES, HostBytes, RunningChecksum, combine_digests, piece_digest
from stoker.kv.device.device_kv import SetKv
from stoker.kv.peer.block_bytes import BeforeWrite, BlockSink, BlockSource
from stoker.kv.peer.lease_book import LeaseBook, LeaseView
from stoker.kv.peer.peer_wire import TRAILER, BlockReply, BlockRequest, FrameKind, PeerConnection, PeerLost
from stoker.kv.peer.transports.transport import IO_TIMEOUT_S, TRANSPORTS, PullProgress

_BLOCK_S = 15.0  # deadline for sending one block: a slow reader must not keep a lease from being closed
_SEND_BYTES = 1 << 20
_FOLLOWS, _ENDED = b"\x01", b"\x00"  # precedes each block, because a lease may end in the middle of a reply


@TRANSPORTS.register("tcp")
class TcpTransport:
    def __init__(self, argument: str, host: str) -> None:
        pass

    def offer(self, kv: SetKv) -> dict[str, Any]:
        return {}

    def open(self, offer: dict[str, Any], peer: KvLayout, kv: SetKv, before_write: BeforeWrite) -> TcpLink:
        return TcpLink()

    def close(self) -> None:
        pass


class TcpLink:
    def supports(self, sink: BlockSink) -> bool:
        return True

    def close(self) -> None:
        pass

    def take(self, connection: PeerConnection, request: BlockRequest, pull: PullProgress) -> LeaseView:
        connection.limit(pull.reply_timeout_s(request.wait_s), IO_TIMEOUT_S)
        connection.send(FrameKind.READ, request.pack())
        view = BlockReply.unpack(connection.receive(FrameKind.DATA)[1]).view
        pull.names += view.names
        follows = connection.receive_bytes(1) if view.blocks else _ENDED
        for left in reversed(range(len(view.blocks))):
            if follows != _FOLLOWS:
                break
            found = _receive(connection, pull)
            # Together with the byte that precedes the next block, which saves a call per block.
            end = connection.receive_bytes(TRAILER.size + (left > 0))
            (expected, held), follows = TRAILER.unpack_from(end), end[TRAILER.size :]
            if found == expected and held:
                pull.sink.place(pull.num_done)
            pull.record(found == expected, bool(held))
        return view


def _receive(connection: PeerConnection, pull: PullProgress) -> int:
    """Receive the next block and return its checksum. Each piece is hashed while it is in the CPU cache."""
    into = pull.sink.buffer(pull.num_done)
    digests = []
    for start in range(0, len(into), PIECE_BYTES):
        piece = into[start : start + PIECE_BYTES]
        connection.limit(pull.timeout_s(), IO_TIMEOUT_S)
        connection.receive_into(piece.data)
        digests.append(piece_digest(piece))
    return combine_digests(digests, len(into))


def send_blocks(
    connection: PeerConnection,
    source: BlockSource,
    leases: LeaseBook,
    layout: KvLayout,
    request: BlockRequest,
    view: LeaseView,
) -> int:
    """The server's side, after the DATA frame: send the blocks, and return how many were sent."""
    part = block_slice(layout, request.part(layout))
    parts = source.host(view.blocks, part)
    connection.limit(IO_TIMEOUT_S, IO_TIMEOUT_S)
    num_blocks = len(view.blocks)
    checksums = view.checksums if part.total_bytes == layout.used_bytes else []
    for count in range(num_blocks):
        with leases.reading(request.lease_id, view.generation) as may_read:
            if not may_read:
                connection.send_bytes(_ENDED)
                return count
            connection.send_bytes(_FOLLOWS, more=True)
            block_checksum = _send(connection, next(parts), checksums[count] if count < len(checksums) else None)
        # Checked again: a preemption may have moved the lease while its bytes were sent.
        held = leases.holds(request.lease_id, view.generation)
        connection.send_bytes(TRAILER.pack(block_checksum, held), more=count + 1 < num_blocks)
    return num_blocks


def _send(connection: PeerConnection, data: HostBytes, known: int | None) -> int:
    running, until_s = RunningChecksum(), time.monotonic() + _BLOCK_S
    step = PIECE_BYTES if known is None else _SEND_BYTES
    for start in range(0, len(data), step):
        part = data[start : start + step]
        if known is None:
            running.add(part)
        connection.send_bytes(part.data)
        if time.monotonic() > until_s:
            raise PeerLost(f"the peer is too slow: {start} of {len(data)} bytes in {_BLOCK_S} s")
    return running.value() if known is None else known

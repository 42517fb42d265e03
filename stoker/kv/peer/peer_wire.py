"""The protocol between a KV server and its clients: frames on one TCP connection, and the proofs of the handshake.

A frame is a header (mark, kind, length) and a bounded payload: JSON for messages that are sent once per connection,
packed numbers for messages of every pull. Blocks follow a DATA frame as raw bytes. The kernel bounds each wait
(SO_RCVTIMEO), so that one call receives a whole block without returning to Python.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import struct
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import ceil, inf
from typing import Any

from stoker.base.ids import BlockId, BlockKey
from stoker.kv.blocks.layout import BlockPart, KvLayout
from stoker.kv.blocks.transfer import BlockName, PeerUnavailable
from stoker.kv.device.checksum import NAME as CHECKSUM
from stoker.kv.peer.lease_book import LeaseView

VERSION = f"2 {CHECKSUM}"
MAX_BLOCKS = 4096  # per request
_MAX_PAYLOAD = 16 << 20
_MAX_HELLO = 1 << 13  # before the other side is authenticated
_MARK = 0x4B56
_HEADER = struct.Struct("<HBxI")
_REQUEST = struct.Struct("<IIdHHBBHI")
_LAYERS = struct.Struct("<HH")  # first and end, one pair for each group
_TOKENS = struct.Struct("<II")  # first and end, within a block
# In the flags of a request. The other bits are the KV set and whether there are keys.
_HAS_LAYERS = 0x80
_HAS_TOKENS = 0x40
_MAX_GROUPS = 64
_REPLY = struct.Struct("<QII?I")
_NAME = struct.Struct("<BBHI")
_CONFIRM = struct.Struct("<Q")
TRAILER = struct.Struct("<QB")  # after a block's bytes: checksum, and whether the lease still had this placement
_SEND_BUFFER_BYTES = 1 << 20  # with 4 MiB the bytes have left the CPU cache before they are sent


class FrameKind(IntEnum):
    """The kinds of frames. The numbers are part of the protocol."""

    HELLO = 1
    CHALLENGE = 2
    PROVE = 3
    WELCOME = 4
    REFUSED = 5
    OPEN = 6
    OPENED = 7
    LOCATE = 8
    LOCATED = 9
    READ = 10
    DATA = 11
    CONFIRM = 12
    CONFIRMED = 13
    RELEASE = 14
    RELEASED = 15


class PeerLost(PeerUnavailable):
    """The connection broke, or the peer was silent for too long."""

    code = "kv_peer_lost"


class BadFrame(PeerUnavailable):
    """The peer sent something that the protocol does not allow."""

    code = "kv_bad_frame"


class PeerConnection:
    """One socket with frames on it. Used by one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.was_kept = False  # whether it was used before and may have ended since
        self._limits: tuple[float, float] = (0.0, 0.0)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # The default send buffer grows only after many round trips. The receive buffer is sized by the kernel: a fixed
        # one wakes the reader more often, which costs up to half as much time again.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)

    def limit(self, receive_s: float, send_s: float) -> None:
        """Set the timeouts for receiving one item and for one sending call; 0 is unlimited."""
        if (receive_s, send_s) == self._limits:
            return
        for option, seconds in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s)):
            # Rounded up: the smallest timeout must not become 0, which is unlimited.
            timeval = struct.pack("@ll", *divmod(ceil(seconds * 1e6), 1_000_000))
            self._sock.setsockopt(socket.SOL_SOCKET, option, timeval)
        self._limits = (receive_s, send_s)

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        self.send_bytes(_HEADER.pack(_MARK, kind, len(payload)) + payload)

    def send_json(self, kind: FrameKind, content: dict[str, Any], before: bytes = b"") -> None:
        self.send(kind, before + json.dumps(content).encode())

    def send_bytes(self, data: bytes | memoryview, more: bool = False) -> None:
        """Send raw bytes. `more`: further bytes follow at once, so a few bytes need no packet of their own."""
        try:
            self._sock.sendall(data, socket.MSG_MORE if more else 0)
        except OSError as error:
            raise PeerLost(f"sending {len(data)} bytes: {error}") from error

    def receive(self, *kinds: FrameKind, hello: bool = False) -> tuple[FrameKind, bytes]:
        """Receive the next frame, which must be of one of these kinds. Raises PeerUnavailable with the peer's reason if
        it refused."""
        mark, number, length = _HEADER.unpack(self.receive_bytes(_HEADER.size))
        if mark != _MARK or length > (_MAX_HELLO if hello else _MAX_PAYLOAD):
            raise BadFrame(f"frame with mark {mark:#x} and {length} bytes")
        payload = self.receive_bytes(length)
        if number == FrameKind.REFUSED:
            reason = load_json(payload)
            raise PeerUnavailable(str(reason.get("message")), code=str(reason.get("code")))
        if number not in kinds:
            raise BadFrame(f"frame {number} instead of one of {[kind.name for kind in kinds]}")
        return FrameKind(number), payload

    def receive_bytes(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        self.receive_into(memoryview(data))
        return bytes(data)

    def receive_into(self, view: memoryview) -> None:
        limit_s, offset, end = self._limits[0], 0, len(view)
        until_s = time.monotonic() + (limit_s or inf)
        while offset < end:
            try:
                count = self._sock.recv_into(view[offset:], end - offset, socket.MSG_WAITALL)
            except OSError as error:
                raise PeerLost(f"{end - offset} of {end} bytes did not arrive: {error}") from error
            if not count:
                raise PeerLost(f"the connection ended, {end - offset} of {end} bytes are missing")
            offset += count
            # The kernel's timeout applies to one call, and every received byte starts another call.
            if offset < end and time.monotonic() >= until_s:
                raise PeerLost(f"{end - offset} of {end} bytes did not arrive in {limit_s:.2f} s")

    def is_idle(self) -> bool:
        """Return True if the connection is open and nothing was received on it. A kept connection must be silent."""
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def shut(self) -> None:
        """End the connection from another thread, and wake the thread that waits on it."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has already ended

    def close(self) -> None:
        self._sock.close()


def load_json(payload: bytes) -> dict[str, Any]:
    """Decode a JSON object. Raises BadFrame."""
    try:
        content = json.loads(payload)
    except (ValueError, RecursionError) as error:  # RecursionError: deeply nested brackets
        raise BadFrame(f"{len(payload)} bytes that are not JSON") from error
    if not isinstance(content, dict):
        raise BadFrame("JSON that is not an object")
    return content


def proof(secret: str | None, side: bytes, nonces: bytes, content: bytes = b"") -> bytes:
    """Return the HMAC by which one side proves that it knows the shared secret. Without a secret, the key is empty."""
    return hmac.digest((secret or "").encode(), b"stoker-kv:" + side + b":" + nonces + content, hashlib.sha256)


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """LOCATE and READ: these heads, layers and tokens of a lease's blocks in a KV set, from `first` on. Without keys: all
    blocks that are ready, with their names. Heads and layers are counted in the set's own layout."""

    lease_id: str
    first: int
    keys: Sequence[BlockKey] | None
    limit: int
    wait_s: float
    first_head: int
    end_head: int
    kv_set: int = 0
    layers: tuple[range, ...] | None = None  # None: all that the peer holds
    tokens: range | None = None  # of each block; None: all of them, and not only those that the peer holds

    def part(self, layout: KvLayout) -> BlockPart:
        """Return the part of the peer's blocks that is requested. `layout` is the peer's, of this KV set."""
        layers = layout.whole_part.layers if self.layers is None else self.layers
        return BlockPart(self.first_head, self.end_head, layers, self.tokens)

    def pack(self) -> bytes:
        lease_id, keys = self.lease_id.encode(), self.keys or ()
        key_bytes = len(keys[0]) if keys else 0
        if any(len(key) != key_bytes for key in keys):
            raise ValueError("keys of different lengths")
        head = _REQUEST.pack(
            self.first, self.limit, self.wait_s, self.first_head, self.end_head,
            key_bytes, self._flags, len(lease_id), len(keys),
        )  # fmt: skip
        tokens = b"" if self.tokens is None else _TOKENS.pack(self.tokens.start, self.tokens.stop)
        layers = b"".join(_LAYERS.pack(one.start, one.stop) for one in self.layers or ())
        return head + lease_id + b"".join(keys) + tokens + layers

    @property
    def _flags(self) -> int:
        has_parts = (_HAS_LAYERS if self.layers is not None else 0) | (_HAS_TOKENS if self.tokens is not None else 0)
        return (self.kv_set << 1) | (self.keys is not None) | has_parts

    @staticmethod
    def unpack(payload: bytes) -> BlockRequest:
        try:
            first, limit, wait_s, first_head, end_head, key_bytes, flags, id_bytes, num_keys = _REQUEST.unpack_from(
                payload
            )
            start = _REQUEST.size + id_bytes
            lease_id = payload[_REQUEST.size : start].decode()
        except (struct.error, UnicodeDecodeError) as error:
            raise BadFrame(f"request of {len(payload)} bytes") from error
        keys_end = start + num_keys * key_bytes
        layers_at = keys_end + (_TOKENS.size if flags & _HAS_TOKENS else 0)
        tokens = _unpack_tokens(payload, keys_end) if flags & _HAS_TOKENS else None
        layers = _unpack_layers(payload, layers_at) if flags & _HAS_LAYERS else None
        end = len(payload) if layers is not None else layers_at
        # NaN fails the comparison too.
        if end != len(payload) or limit > MAX_BLOCKS or not 0 <= wait_s <= 3600:
            raise BadFrame(f"request of {len(payload)} bytes with {num_keys} keys, limit {limit}, wait {wait_s}")
        if num_keys and not key_bytes:
            raise BadFrame(f"request with {num_keys} empty keys")
        ends = range(start + key_bytes, keys_end + 1, key_bytes) if num_keys else ()
        keys = [BlockKey(payload[end - key_bytes : end]) for end in ends]
        found = keys if flags & 1 else None  # a worker of an older release has one KV set, and sends 0 or 1
        kv_set = (flags & ~(_HAS_LAYERS | _HAS_TOKENS)) >> 1
        return BlockRequest(lease_id, first, found, limit, wait_s, first_head, end_head, kv_set, layers, tokens)


@dataclass(frozen=True, slots=True)
class BlockReply:
    """LOCATED and DATA: a view of a lease. Only LOCATED has the checksums here; DATA sends one behind each block."""

    view: LeaseView
    checksums: list[int]

    def pack(self) -> bytes:
        view = self.view
        head = _REPLY.pack(view.generation, len(view.blocks), view.num_ready, view.complete, len(self.checksums))
        body = array("I", view.blocks).tobytes() + array("Q", self.checksums).tobytes()
        return head + body + b"".join(map(_pack_name, view.names))

    @staticmethod
    def unpack(payload: bytes) -> BlockReply:
        try:
            generation, num_blocks, num_ready, complete, num_checksums = _REPLY.unpack_from(payload)
            checksums_at = _REPLY.size + 4 * num_blocks
            names_at = checksums_at + 8 * num_checksums
            blocks = array("I", payload[_REPLY.size : checksums_at]).tolist()
            checksums = array("Q", payload[checksums_at:names_at]).tolist()
            names = _unpack_names(payload, names_at)
        except (struct.error, ValueError) as error:
            raise BadFrame(f"reply of {len(payload)} bytes") from error
        if len(blocks) != num_blocks or len(checksums) != num_checksums or num_blocks > MAX_BLOCKS:
            raise BadFrame(f"reply of {len(payload)} bytes for {num_blocks} blocks")
        return BlockReply(
            LeaseView(generation, [BlockId(block) for block in blocks], names, num_ready, complete), checksums
        )


def _unpack_tokens(payload: bytes, offset: int) -> range:
    """Return the tokens of a request. Raises BadFrame."""
    try:
        return range(*_TOKENS.unpack_from(payload, offset))
    except struct.error as error:
        raise BadFrame(f"request of {len(payload)} bytes without its tokens") from error


def _unpack_layers(payload: bytes, offset: int) -> tuple[range, ...]:
    """Return the layers of each group. Raises BadFrame."""
    num_bytes = len(payload) - offset
    if not 0 < num_bytes <= _MAX_GROUPS * _LAYERS.size or num_bytes % _LAYERS.size:
        raise BadFrame(f"request of {len(payload)} bytes with {num_bytes} for layers")
    return tuple(range(first, end) for first, end in _LAYERS.iter_unpack(payload[offset:]))


def _pack_name(name: BlockName) -> bytes:
    # A missing salt is not the same as an empty one.
    salt = b"" if name.salt is None else b"+" + name.salt.encode()
    head = _NAME.pack(len(name.key), len(name.parent), len(salt), len(name.token_ids))
    return head + name.key + name.parent + salt + array("I", name.token_ids).tobytes()


def _unpack_names(payload: bytes, offset: int) -> list[BlockName]:
    names = []
    while offset < len(payload):
        key_bytes, parent_bytes, salt_bytes, num_tokens = _NAME.unpack_from(payload, offset)
        key_at = offset + _NAME.size
        parent_at = key_at + key_bytes
        salt_at = parent_at + parent_bytes
        tokens_at = salt_at + salt_bytes
        offset = tokens_at + 4 * num_tokens
        salt = payload[salt_at:tokens_at].decode()
        names.append(
            BlockName(
                BlockKey(payload[key_at:parent_at]),
                BlockKey(payload[parent_at:salt_at]),
                tuple(array("I", payload[tokens_at:offset])),
                salt[1:] if salt else None,
            )
        )
        if offset > len(payload):
            raise ValueError("truncated name")
    return names


def pack_confirm(lease_id: str, generation: int) -> bytes:
    return _CONFIRM.pack(generation) + lease_id.encode()


def unpack_confirm(payload: bytes) -> tuple[str, int]:
    try:
        (generation,) = _CONFIRM.unpack_from(payload)
        return payload[_CONFIRM.size :].decode(), generation
    except (struct.error, UnicodeDecodeError) as error:
        raise BadFrame(f"CONFIRM of {len(payload)} bytes") from error

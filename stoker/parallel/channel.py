"""Channels: messages of bytes between two processes, in order, over a stream socket.

A `PlainChannel` is for a socket pair, whose ends only this process can give away. A `SignedChannel` is for TCP: both sides prove
that they know a shared key, and every message is signed with a key that only this connection has. So no other machine on the
network can send a message, repeat one or change one. Messages are not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import select
import socket
import struct
import threading
import time
from typing import Protocol

from stoker.base.errors import StokerError

MAX_MESSAGE_BYTES = 256 << 20  # far above the longest plan; a longer message means that the stream is corrupt
SILENT_S = 4.0  # a machine that acknowledges nothing for this time is gone
_LENGTH = struct.Struct("<I")
_NONCE_BYTES, _SIGNATURE_BYTES = 16, 16
_MAGIC = b"stoker-ranks-1\0\0"
_READ_BYTES = 1 << 20


class ChannelEnd(StokerError):
    """The other end of a channel is gone, or what it sends cannot be trusted."""

    code = "channel_ended"


class WrongKey(ChannelEnd):
    """The other end does not know the shared key."""

    code = "wrong_key"


class Channel(Protocol):
    """One end of a connection. Several threads may send, one receives."""

    def fileno(self) -> int: ...

    def send(self, message: bytes) -> None:
        """Send a message. Raises ChannelEnd if the other end is gone."""

    def receive(self) -> bytes:
        """Wait for a message. Raises ChannelEnd if the other end is gone."""

    def close(self) -> None: ...


class PlainChannel:
    """Messages with their length in front."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        with self._lock:
            self._write(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes:
        return self._read(self._read_length())

    def close(self) -> None:
        self._socket.close()

    def _read_length(self) -> int:
        """Wait for the next message, however long that takes. The rest of a message must follow within the socket's timeout."""
        try:
            select.select([self._socket], [], [])
        except (OSError, ValueError) as error:  # it was closed
            raise ChannelEnd("the connection is closed") from error
        (count,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if count > MAX_MESSAGE_BYTES:
            raise ChannelEnd(f"a message of {count:,} bytes; at most {MAX_MESSAGE_BYTES:,} are allowed")
        return int(count)

    def _write(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise ChannelEnd(f"the other end is gone ({error.strerror or error})") from error

    def _read(self, count: int) -> bytes:
        """Read in parts, so that memory is taken for bytes that arrive and not for a length that is announced."""
        data = bytearray()
        while len(data) < count:
            try:
                part = self._socket.recv(min(count - len(data), _READ_BYTES))
            except OSError as error:
                raise ChannelEnd(f"the other end is gone ({error.strerror or error})") from error
            if not part:
                raise ChannelEnd("the other end has closed the connection")
            data += part
        return bytes(data)


class SignedChannel(PlainChannel):
    """Signed messages over TCP. A signature covers the direction, the number of the message and its bytes."""

    def __init__(self, connection: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        super().__init__(connection)
        self._send_key, self._receive_key = send_key, receive_key
        self._num_sent = self._num_received = 0
        _set_up(connection)

    def send(self, message: bytes) -> None:
        with self._lock:
            signature = _sign(self._send_key, self._num_sent, message)
            self._num_sent += 1
            self._write(b"".join((_LENGTH.pack(len(message)), message, signature)))

    def receive(self) -> bytes:
        message = self._read(self._read_length())
        signature = self._read(_SIGNATURE_BYTES)
        if not hmac.compare_digest(signature, _sign(self._receive_key, self._num_received, message)):
            raise ChannelEnd("a message has a wrong signature")
        self._num_received += 1
        return message


def call(connection: socket.socket, key: bytes, timeout_s: float) -> SignedChannel:
    """Do the handshake on the side that connected. Raises WrongKey if the other side has another key."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    answer = _Handshake(connection, timeout_s)
    answer.write(_MAGIC + nonce)
    head = answer.read(len(_MAGIC) + _NONCE_BYTES + hashlib.sha256().digest_size)
    magic, other_nonce, proof = _split(head)
    if magic != _MAGIC:
        raise ChannelEnd("the other side is no Stoker rank, or one of another version")
    nonces = nonce + other_nonce
    if not hmac.compare_digest(proof, _proof(key, b"answers", nonces)):
        raise WrongKey("the other side has another secret")
    answer.write(_proof(key, b"calls", nonces))
    return SignedChannel(connection, _proof(key, b"to head", nonces), _proof(key, b"to rank", nonces))


def answer(connection: socket.socket, key: bytes, timeout_s: float) -> SignedChannel:
    """Do the handshake on the side that listens. Raises WrongKey if the other side has another key."""
    caller = _Handshake(connection, timeout_s)
    magic, other_nonce, _ = _split(caller.read(len(_MAGIC) + _NONCE_BYTES))
    if magic != _MAGIC:
        raise ChannelEnd("the other side is no Stoker rank, or one of another version")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    nonces = other_nonce + nonce
    caller.write(_MAGIC + nonce + _proof(key, b"answers", nonces))
    try:
        found = caller.read(hashlib.sha256().digest_size)
    except ChannelEnd as error:
        raise WrongKey("the other side ended the handshake, probably because it has another secret") from error
    if not hmac.compare_digest(found, _proof(key, b"calls", nonces)):
        raise WrongKey("the other side has another secret")
    return SignedChannel(connection, _proof(key, b"to rank", nonces), _proof(key, b"to head", nonces))


class _Handshake:
    """Reads and writes with one deadline for the whole handshake: a stranger may send one byte a second."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._socket, self._until_s = connection, time.monotonic() + timeout_s

    def write(self, data: bytes) -> None:
        self._limit()
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise ChannelEnd(f"the other end is gone ({error.strerror or error})") from error

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            self._limit()
            try:
                part = self._socket.recv(count - len(data))
            except OSError as error:
                raise ChannelEnd(f"the other end is gone ({error.strerror or error})") from error
            if not part:
                raise ChannelEnd("the other end has closed the connection")
            data += part
        return data

    def _limit(self) -> None:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise ChannelEnd("the handshake takes too long")
        self._socket.settimeout(left_s)


def _set_up(connection: socket.socket) -> None:
    connection.settimeout(SILENT_S)  # for the rest of a message, and for one that the other end does not read
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # a machine that lost its power or its network closes no connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT_S * 1000))


def _split(head: bytes) -> tuple[bytes, bytes, bytes]:
    nonce_end = len(_MAGIC) + _NONCE_BYTES
    return head[: len(_MAGIC)], head[len(_MAGIC) : nonce_end], head[nonce_end:]


def _proof(key: bytes, purpose: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, b"stoker-ranks:" + purpose + b":" + nonces, hashlib.sha256)


def _sign(key: bytes, number: int, message: bytes) -> bytes:
    state = hashlib.blake2b(number.to_bytes(8, "little"), key=key, digest_size=_SIGNATURE_BYTES)
    state.update(message)
    return state.digest()

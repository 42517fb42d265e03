"""The pipe between the server process and the engine process of a worker: length-prefixed msgpack over a socket pair.

The engine's end uses threads and blocking calls, the server's end uses asyncio. If one end closes, the other ends.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from contextlib import suppress
from typing import TypeVar

import msgspec

from stoker.base.errors import EngineDied
from stoker.proto.messages import FromEngine, ToEngine

T = TypeVar("T")

_LENGTH = struct.Struct("<I")
# Far above the longest prompt. A larger frame means that the stream is corrupt.
_MAX_FRAME_BYTES = 1 << 30
_MAX_READ_BYTES = 1 << 20


class FrameEnd(Exception):
    """The other side closed the pipe."""


def _frame(encoder: msgspec.msgpack.Encoder, message: object) -> bytes:
    payload = encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


def _decoded(decoder: msgspec.msgpack.Decoder[T], payload: bytes) -> T:
    """Decode a payload. Raises DecodeError for everything that is not a message."""
    try:
        return decoder.decode(payload)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


class EngineEnd:
    """The end in the engine process. One thread calls `receive`; any thread can call `send`."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = sock.makefile("rb", buffering=1 << 16)
        self._sending = threading.Lock()  # a large frame takes several writes
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def receive(self) -> ToEngine:
        """Wait for a message. Raises FrameEnd when the server has closed the pipe."""
        length = _LENGTH.unpack(self._read(_LENGTH.size))[0]
        if length > _MAX_FRAME_BYTES:
            raise msgspec.DecodeError(f"a frame of {length} bytes; at most {_MAX_FRAME_BYTES} are allowed")
        return _decoded(self._decoder, self._read(length))

    def send(self, message: FromEngine) -> None:
        try:
            with self._sending:
                self._socket.sendall(_frame(self._encoder, message))
        except OSError as error:
            raise FrameEnd from error

    def close(self) -> None:
        """Close the pipe. A thread that waits in `receive` gets FrameEnd."""
        with suppress(OSError):  # the server has closed it
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self, count: int) -> bytes:
        """Read in parts, so that memory is taken for bytes that arrive and not for a length that a frame announces."""
        parts: list[bytes] = []
        while count:
            try:
                part = self._reader.read(min(count, _MAX_READ_BYTES))
            except OSError as error:
                raise FrameEnd from error
            if not part:
                raise FrameEnd
            parts.append(part)
            count -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


class ServerEnd:
    """The end in the server process, on its event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

    @classmethod
    async def connect(cls, sock: socket.socket) -> ServerEnd:
        reader, writer = await asyncio.open_connection(sock=sock)
        return cls(reader, writer)

    async def receive(self) -> FromEngine:
        """Wait for a message. Raises FrameEnd when the engine has closed the pipe or the stream is corrupt."""
        try:
            head = await self._reader.readexactly(_LENGTH.size)
            length = _LENGTH.unpack(head)[0]
            if length > _MAX_FRAME_BYTES:
                raise FrameEnd
            return _decoded(self._decoder, await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise FrameEnd from error

    def send(self, message: ToEngine) -> None:
        """Send without waiting. The engine always reads, so the buffer is bounded by the number of accepted requests."""
        if self._writer.is_closing():
            raise EngineDied("the engine has ended")
        self._writer.write(_frame(self._encoder, message))

    def close(self) -> None:
        self._writer.close()

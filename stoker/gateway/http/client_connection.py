"""The server side of one client connection: parses requests, runs one exchange at a time, enforces the limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

from stoker.gateway.http.chunked import ChunkedReader
from stoker.gateway.http.errors import BadMessage, error_body
from stoker.gateway.http.head import CHUNKED, HeadParser, RequestHead
from stoker.gateway.http.limits import ServerLimits
from stoker.gateway.http.request import STATUS_LINES, HttpRequest

_HEAD = 0  # waiting for a request head; the connection is idle while no byte of it has arrived
_BODY = 1
_BUSY = 2  # the handler has the request
_DRAIN = 3  # answered; waits until the client has read enough of the response to begin another exchange
_LINGER = 4  # refused; further input is read and dropped, so that the client can read the error
_CLOSED = 5

_WRITE_HIGH_BYTES = 128 << 10
_WRITE_LOW_BYTES = 32 << 10
_MAX_AHEAD_BYTES = 64 << 10  # of pipelined requests buffered while one is served
_MAX_PIECES = 256
_LINGER_S = 2.0
_LINGER_BYTES = 1 << 20
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class OwningServer(Protocol):
    """What a ClientConnection needs from its server. `now` advances with each sweep."""

    limits: ServerLimits
    heads: HeadParser
    loop: asyncio.AbstractEventLoop
    now: float
    draining: bool
    on_bad: Callable[[str, str], None]

    def admit(self, connection: ClientConnection) -> bool: ...

    def forget(self, connection: ClientConnection) -> None: ...

    def run(self, request: HttpRequest) -> None: ...


class ClientConnection(asyncio.Protocol):
    """One client connection. `_phase` says which part of an exchange it is in."""

    __slots__ = (
        "_body_began",
        "_buffer",
        "_head",
        "_left",
        "_phase",
        "_pieces",
        "_read_paused",
        "_reader",
        "_received",
        "_request",
        "_server",
        "_since",
        "_stuck_bytes",
        "_stuck_since",
        "paused",
        "peer",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, server: OwningServer) -> None:
        self._server = server
        self.peer = ""
        self.paused = False  # the write buffer is full
        self._phase = _HEAD
        self._buffer = b""  # bytes not parsed yet
        self._head: RequestHead | None = None
        self._pieces: list[bytes | bytearray] = []
        self._left = 0
        self._reader: ChunkedReader | None = None
        self._received = 0
        self._request: HttpRequest | None = None
        self._read_paused = False
        self._since = self._body_began = self._stuck_since = server.now
        self._stuck_bytes = 0

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._server.loop

    @property
    def draining(self) -> bool:
        return self._server.draining

    @property
    def idle(self) -> bool:
        return self._phase == _HEAD and not self._buffer

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]) if isinstance(name, tuple) else ""
        transport.set_write_buffer_limits(high=_WRITE_HIGH_BYTES, low=_WRITE_LOW_BYTES)
        if not self._server.admit(self):
            self._refuse(503, "the gateway has too many connections or is stopping; retry later")

    def data_received(self, data: bytes) -> None:
        if self._phase == _HEAD:
            if self._buffer:
                data = self._buffer + data
                self._buffer = b""
            else:
                self._since = self._server.now
            self._read_head(data)
        elif self._phase == _BODY:
            self._since = self._server.now
            self._read_body(data)
        elif self._phase in (_BUSY, _DRAIN):
            self._buffer += data
            if len(self._buffer) > _MAX_AHEAD_BYTES and not self._read_paused:
                self._read_paused = True
                self.transport.pause_reading()
        elif self._phase == _LINGER:
            self._received += len(data)
            if self._received > _LINGER_BYTES and not self._read_paused:
                self._read_paused = True
                self.transport.pause_reading()

    def eof_received(self) -> bool | None:
        # A client that closed its sending side could still read the response. Like most servers, treat it as gone: a client
        # that cancels its request looks the same.
        if self._request is not None:
            self.cut()
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._phase = _CLOSED
        self._server.forget(self)
        self._lose_request()
        self._buffer = b""
        self._pieces = []

    def pause_writing(self) -> None:
        self.paused = True
        self._stuck_since = self._server.now
        self._stuck_bytes = -1
        if self._request is not None and self._request.on_pause is not None:
            self._request.on_pause()

    def resume_writing(self) -> None:
        self.paused = False
        if self._request is not None:
            if self._request.on_resume is not None:
                self._request.on_resume()
        elif self._phase == _DRAIN:
            self._next()

    # ---- called by the exchange and the server

    def exchange_ended(self, keep_alive: bool) -> None:
        self._request = None
        if not keep_alive or self._server.draining:
            self._close()
        elif self.paused:
            self._phase = _DRAIN
        else:
            self._next()

    def cut(self) -> None:
        """Close now, without sending buffered data."""
        if self._phase == _CLOSED:
            return
        self._phase = _CLOSED
        self.transport.abort()
        self._lose_request()

    def close_if_idle(self) -> None:
        if self.idle:
            self._close()

    def sweep(self, now: float) -> None:
        """Apply the time limits; called every `limits.sweep_s`. Times are one sweep coarse, so that much is tolerated."""
        limits = self._server.limits
        waited = now - self._since - limits.sweep_s
        if self._phase == _HEAD:
            if not self._buffer:
                if waited > limits.keepalive_s:
                    self._close()
            elif waited > limits.head_s:
                self._refuse(408, f"the request head was not complete after {limits.head_s:g} s")
        elif self._phase == _BODY:
            if waited > limits.body_idle_s:
                self._refuse(408, f"no byte of the request body arrived for {limits.body_idle_s:g} s")
            elif now - self._body_began - limits.sweep_s > limits.body_s:
                self._refuse(408, f"the request body was not complete after {limits.body_s:g} s")
        elif self._phase == _LINGER:
            if waited > _LINGER_S:
                self.cut()
        elif self.paused or self._phase == _CLOSED:
            self._check_stall(now)

    # ---- reading

    def _read_head(self, data: bytes) -> None:
        limits = self._server.limits
        end = data.find(b"\r\n\r\n")
        if end < 0 or end > limits.max_head_bytes:
            self._incomplete_head(data)
            return
        try:
            head, length = self._server.heads.request(data[:end])
        except BadMessage as bad:
            self._refuse(bad.status, bad.reason)
            return
        at = end + 4
        if length == 0:
            self._buffer = data[at:]
            self._hand_over(head, b"")
        elif 0 < length <= len(data) - at and length <= limits.max_body_bytes:
            self._buffer = data[at + length :]
            self._hand_over(head, data[at : at + length])
        else:
            self._begin_body(head, length, data[at:])

    def _incomplete_head(self, data: bytes) -> None:
        limit = self._server.limits.max_head_bytes
        if len(data) > limit:
            status = 431 if b"\r\n" in data[:limit] else 414
            self._refuse(status, f"the request head is larger than {limit} bytes")
        elif not 65 <= data[0] <= 90:
            self._refuse(400, "this is not HTTP")
        elif data.count(b"\n") != data.count(b"\r\n"):
            self._refuse(400, "a line of the request head does not end in CRLF")
        else:
            self._buffer = data

    def _begin_body(self, head: RequestHead, length: int, data: bytes) -> None:
        limit = self._server.limits.max_body_bytes
        if length > limit:
            self._refuse(413, f"the request body has {length} bytes; at most {limit} are allowed")
            return
        self._phase = _BODY
        self._body_began = self._since = self._server.now
        self._head = head
        self._received = 0
        self._reader = ChunkedReader() if length == CHUNKED else None
        self._left = max(length, 0)
        if data:
            self._read_body(data)
        elif head.expects:
            self.transport.write(_CONTINUE)

    def _read_body(self, data: bytes) -> None:
        if self._reader is not None:
            self._read_chunks(self._reader, data)
            return
        left = self._left
        if len(data) > left:
            self._buffer = data[left:]
            data = data[:left]
        self._left = left - len(data)
        self._keep(data)
        if self._left == 0:
            self._end_body()

    def _read_chunks(self, reader: ChunkedReader, data: bytes) -> None:
        try:
            payload = reader.feed(data)
        except BadMessage as bad:
            self._refuse(bad.status, bad.reason)
            return
        self._received += len(payload)
        limit = self._server.limits.max_body_bytes
        if self._received > limit:
            self._refuse(413, f"the request body has more than {limit} bytes, the largest allowed size")
            return
        if payload:
            self._keep(payload)
        if reader.done:
            self._buffer = reader.rest
            self._end_body()

    def _keep(self, data: bytes) -> None:
        pieces = self._pieces
        if len(pieces) < _MAX_PIECES:
            pieces.append(data)
        else:
            # Many tiny pieces would take far more memory than their bytes, so append to one growing buffer from here on.
            last = pieces[-1]
            if isinstance(last, bytearray):
                last += data
            else:
                pieces[-1] = bytearray(last + data)

    def _end_body(self) -> None:
        assert self._head is not None
        head, self._head = self._head, None
        pieces, self._pieces = self._pieces, []
        self._reader = None
        self._hand_over(head, b"".join(pieces))

    def _hand_over(self, head: RequestHead, body: bytes) -> None:
        self._phase = _BUSY
        self._request = request = HttpRequest(head, body, self.peer, self)
        self._server.run(request)

    # ---- ending an exchange or the connection

    def _next(self) -> None:
        self._phase = _HEAD
        self._since = self._server.now
        if self._read_paused:
            self._read_paused = False
            self.transport.resume_reading()
        if self._buffer:
            data, self._buffer = self._buffer, b""
            self._read_head(data)

    def _refuse(self, status: int, reason: str) -> None:
        """Send an error and stop parsing. The socket stays open for a short time: closing it with unread input would reset
        the connection, and the client would not see the error."""
        body = error_body(status, reason, "bad_http" if status < 500 else "not_supported")
        head = b"%bcontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (STATUS_LINES[status], len(body)) + body)
        self._phase = _LINGER
        self._since = self._server.now
        self._received = 0
        self._buffer = b""
        self._pieces = []
        self._head = self._reader = None
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self._close()
        self._server.on_bad(self.peer, f"{status}: {reason}")

    def _close(self) -> None:
        self._phase = _CLOSED
        self._stuck_since = self._server.now
        self._stuck_bytes = -1
        self.transport.close()

    def _lose_request(self) -> None:
        request, self._request = self._request, None
        if request is not None:
            request.lose()

    def _check_stall(self, now: float) -> None:
        waiting = self.transport.get_write_buffer_size()
        if waiting != self._stuck_bytes:
            self._stuck_bytes = waiting
            self._stuck_since = now
        elif now - self._stuck_since > self._server.limits.write_stall_s:
            self._phase = _CLOSED
            self.transport.abort()
            self._lose_request()

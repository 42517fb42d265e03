"""The server side of one client connection: parses requests, runs one exchange at a time, enforces the limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

from stoker.gateway.http.body_budget import PUBLIC, BodyBudget
from stoker.gateway.http.errors import BadMessage, error_body
from stoker.gateway.http.gate import BodyGrant, HeadRefusal, RequestGate
from stoker.gateway.http.half_closed import HalfClosedProbe
from stoker.gateway.http.head import HeadParser, RequestHead, header_block
from stoker.gateway.http.limits import ServerLimits
from stoker.gateway.http.open_connections import OpenConnections
from stoker.gateway.http.request import STATUS_LINES, HttpRequest
from stoker.gateway.http.request_body import TOO_MANY_BYTES, RequestBody
from stoker.gateway.http.unread_answers import UnreadAnswers

_HEAD = 0  # waiting for a request head; the connection is idle while no byte of it has arrived
_BODY = 1
_BUSY = 2  # the handler has the request
_DRAIN = 3  # answered; waits until the client has read enough of the response to begin another exchange
_LINGER = 4  # refused; further input is read and dropped, so that the client can read the error
_CLOSED = 5

_WRITE_HIGH_BYTES = 128 << 10
_WRITE_LOW_BYTES = 32 << 10
_MAX_AHEAD_BYTES = 64 << 10  # of pipelined requests buffered while one is served
_LINGER_S = 2.0
_LINGER_BYTES = 1 << 20
_TOO_LARGE = 413
_SMALL_BYTES = 4096
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_JSON = b"content-type: application/json\r\n"
_RETRY = _JSON + b"retry-after: 1\r\n"
_CODES = {408: "request_timeout", 413: "body_too_large", 429: "too_many_connections", 503: "overloaded"}


class OwningServer(Protocol):
    """What a ClientConnection needs from its server. `now` advances with each sweep."""

    limits: ServerLimits
    heads: HeadParser
    gate: RequestGate
    bodies: BodyBudget
    connections: OpenConnections
    unread: UnreadAnswers
    loop: asyncio.AbstractEventLoop
    now: float
    draining: bool
    closing: bool
    on_bad: Callable[[str, str], None]

    def refusal(self, connection: ClientConnection) -> BadMessage | None: ...

    def forget(self, connection: ClientConnection) -> None: ...

    def run(self, request: HttpRequest) -> None: ...


class ClientConnection(asyncio.Protocol):
    """One client connection. `_phase` says which part of an exchange it is in."""

    __slots__ = (
        "_body",
        "_body_began",
        "_buffer",
        "_grant",
        "_head",
        "_phase",
        "_probe",
        "_read_paused",
        "_received",
        "_request",
        "_server",
        "_since",
        "_stuck_bytes",
        "_stuck_since",
        "group",
        "paused",
        "peer",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, server: OwningServer) -> None:
        self._server = server
        self.peer = ""
        self.group = ""  # the client's address as limits count it; set by OpenConnections
        self.paused = False  # the write buffer is full
        self._phase = _HEAD
        self._buffer = b""  # bytes not parsed yet
        self._head: RequestHead | None = None  # while its body is received, with `_grant` and `_body`
        self._grant: BodyGrant | None = None
        self._body: RequestBody | None = None
        self._probe: HalfClosedProbe | None = None  # set once the client has closed its sending side
        self._received = 0  # bytes dropped after a refusal
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
        refusal = self._server.refusal(self)
        if refusal is None:
            self._server.connections.idle[self] = None
        elif self._phase != _CLOSED:
            self._refuse(refusal.status, refusal.reason)
            self._server.connections.refused.pop(self, None)  # closing it would make no room: it has none

    def data_received(self, data: bytes) -> None:
        if self._phase == _HEAD:
            if self._buffer:
                checked = len(self._buffer)
                data = self._buffer + data
                self._buffer = b""
            else:
                checked = 0
                self._since = self._server.now
                self._server.connections.idle.pop(self, None)
            self._read_head(data, checked)
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
        """Keep serving a client that has only closed its sending side. With TLS this is not possible, so it is gone."""
        if self._request is None and self._phase != _DRAIN:
            return None
        if not self.transport.can_write_eof():
            self.cut()
            return None
        first_s = self._server.limits.half_closed_probe_s
        self._probe = HalfClosedProbe(self.transport, self.loop, first_s, self._send_probe, self.cut)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._phase = _CLOSED
        self._server.forget(self)
        if self._probe is not None:
            self._probe.stop()
        self._lose_request()
        self._buffer = b""
        self._drop_body()

    def pause_writing(self) -> None:
        self.paused = True
        self._stuck_since = self._server.now
        self._stuck_bytes = -1
        if self._request is not None and self._request.on_pause is not None:
            self._request.on_pause()

    def resume_writing(self) -> None:
        self.paused = False
        self._server.unread.remove(self)
        if self._request is not None:
            if self._request.on_resume is not None:
                self._request.on_resume()
        elif self._phase == _DRAIN:
            self._next()

    # ---- called by the exchange and the server

    def exchange_ended(self, keep_alive: bool) -> None:
        request, self._request = self._request, None
        if self.paused and request is not None:
            waiting = self.transport.get_write_buffer_size()
            self._server.unread.add(self, request.account or self.group, waiting)
        if not keep_alive or self._server.closing:
            self._close()
        elif self.paused:
            self._phase = _DRAIN
        else:
            self._next()

    def cut(self) -> None:
        """Close now, without sending buffered data."""
        if self._phase != _CLOSED:
            self.abandon()

    def abandon(self) -> None:
        """Close now, even if the connection is already being closed after its last bytes."""
        self._phase = _CLOSED
        self.transport.abort()
        self._drop_body()
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

    def _read_head(self, data: bytes, checked: int = 0) -> None:
        """Read a request head. The first `checked` bytes were found to be incomplete before."""
        limits = self._server.limits
        end = data.find(b"\r\n\r\n", max(0, checked - 3))
        if end < 0 or end > limits.max_head_bytes:
            self._incomplete_head(data, checked)
            return
        try:
            head, length = self._server.heads.request(data[:end])
        except BadMessage as bad:
            self._refuse(bad.status, bad.reason)
            return
        grant = self._server.gate(head, self.peer)
        if isinstance(grant, HeadRefusal):
            self._refuse_head(grant)
            return
        at = end + 4
        if length == 0:
            self._buffer = data[at:]
            self._hand_over(head, b"", grant)
        elif 0 < length <= len(data) - at and length <= grant.max_body_bytes:
            self._buffer = data[at + length :]
            self._hand_over_whole(head, data[at : at + length], grant)
        else:
            self._begin_body(head, length, data[at:], grant)

    def _incomplete_head(self, data: bytes, checked: int) -> None:
        limit = self._server.limits.max_head_bytes
        last = max(0, checked - 1)  # a CR whose LF has just arrived
        if len(data) > limit:
            status = 431 if b"\r\n" in data[:limit] else 414
            self._refuse(status, f"the request head is larger than {limit} bytes")
        elif not 65 <= data[0] <= 90:
            self._refuse(400, "this is not HTTP")
        elif data.count(b"\n", checked) != data.count(b"\r\n", last):
            self._refuse(400, "a line of the request head does not end in CRLF")
        elif self._probe is not None:
            self._close()  # the rest will never arrive
        else:
            self._buffer = data
            self._server.connections.starting.setdefault(self)

    def _begin_body(self, head: RequestHead, length: int, data: bytes, grant: BodyGrant) -> None:
        try:
            self._body = RequestBody(length, grant, grant.account or self.group, self._server.bodies)
        except BadMessage as bad:
            self._refuse_body(bad, grant)
            return
        if grant.account == PUBLIC:
            self._server.connections.starting.setdefault(self)
        else:
            self._server.connections.starting.pop(self, None)
        self._phase = _BODY
        self._body_began = self._since = self._server.now
        self._head = head
        self._grant = grant
        if data:
            self._read_body(data)
        elif self._probe is not None:
            self._close()
        elif head.expects:
            self.transport.write(_CONTINUE)

    def _read_body(self, data: bytes) -> None:
        body = self._body
        assert body is not None
        try:
            if body.tired and not data:
                body.go_on()
            else:
                body.feed(data)
        except BadMessage as bad:
            self._refuse_body(bad, self._grant)
            return
        if body.done:
            self._end_body(body)
        elif body.tired:
            self.transport.pause_reading()
            self.loop.call_soon(self._go_on, body)
        elif self._probe is not None:
            self._close()

    def _go_on(self, body: RequestBody) -> None:
        """Continue with a body whose parsing was interrupted to let other connections run."""
        if self._body is body and self._phase == _BODY:
            self.transport.resume_reading()
            self._read_body(b"")

    def _end_body(self, body: RequestBody) -> None:
        head, grant = self._head, self._grant
        assert head is not None
        assert grant is not None
        self._head = self._grant = self._body = None
        self._buffer = body.rest
        self._hand_over(head, body.joined(), grant, body.account, body.num_held)

    def _hand_over_whole(self, head: RequestHead, data: bytes, grant: BodyGrant) -> None:
        """Pass on a request whose body arrived together with its head."""
        if len(data) <= _SMALL_BYTES:
            # Not counted: it is less than the connection itself takes.
            self._hand_over(head, data, grant)
            return
        account = grant.account or self.group
        if account == PUBLIC:
            # Not counted, because the answer does not wait for anything. So a worker can register while others hold all
            # that clients without credentials may.
            self._hand_over(head, data, grant)
        elif self._server.bodies.take(account, len(data)):
            self._hand_over(head, data, grant, account, len(data))
        else:
            self._refuse(503, TOO_MANY_BYTES)

    def _hand_over(
        self, head: RequestHead, body: bytes, grant: BodyGrant, account: str = "", num_held: int = 0
    ) -> None:
        server = self._server
        if server.connections.starting:
            server.connections.starting.pop(self, None)
        self._phase = _BUSY
        self._request = request = HttpRequest(head, body, self.peer, self, grant.caller)
        request.account, request.num_held = account, num_held
        server.run(request)

    # ---- ending an exchange or the connection

    def _next(self) -> None:
        self._phase = _HEAD
        self._since = self._server.now
        if self._read_paused:
            self._read_paused = False
            if self._probe is None:
                self.transport.resume_reading()
        if self._buffer:
            data, self._buffer = self._buffer, b""
            self._read_head(data)
        elif self._probe is not None:
            self._close()
        else:
            self._server.connections.idle[self] = None

    def _refuse_body(self, bad: BadMessage, grant: BodyGrant | None) -> None:
        if bad.status == _TOO_LARGE and grant is not None and grant.beyond is not None:
            self._refuse_head(grant.beyond())
        else:
            self._refuse(bad.status, bad.reason)

    def _refuse_head(self, refusal: HeadRefusal) -> None:
        self._refuse_with(refusal.status, header_block(refusal.headers), refusal.body)

    def _refuse(self, status: int, reason: str) -> None:
        """Send an error about the request's form or size, and stop parsing."""
        code = _CODES.get(status, "bad_http" if status < 500 else "not_supported")
        self._refuse_with(status, _RETRY if status in (429, 503) else _JSON, error_body(status, reason, code))
        self._server.on_bad(self.peer, f"{status}: {reason}")

    def _refuse_with(self, status: int, headers: bytes, body: bytes) -> None:
        """Send an error and stop parsing. The socket stays open for a short time: closing it with unread input would reset
        the connection, and the client would not see the error."""
        head = b"%b%bcontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (STATUS_LINES[status], headers, len(body)) + body)
        self._server.connections.starting.pop(self, None)
        self._phase = _LINGER
        self._since = self._server.now
        self._received = 0
        self._buffer = b""
        if self._body is not None and self._body.tired and not self._read_paused:
            self.transport.resume_reading()
        self._drop_body()
        if self._probe is None and self.transport.can_write_eof():
            self.transport.write_eof()
            self._server.connections.refused[self] = None
        else:
            self._close()

    def _send_probe(self) -> None:
        if self._request is not None:
            self._request.probe()

    def _drop_body(self) -> None:
        if self._body is not None:
            self._body.give_back()
        self._head = self._grant = self._body = None

    def _close(self) -> None:
        self._phase = _CLOSED
        self._drop_body()
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
            self.abandon()

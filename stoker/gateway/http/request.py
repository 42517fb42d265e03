"""One exchange as its handler sees it: the client's complete request, and the methods that send the response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Protocol

from stoker.gateway.http.head import Headers, RequestHead, header_block

STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}
_BODILESS = frozenset({204, 304})
_NO_HEADERS = b""

# How the bytes that the handler writes are framed. The hot path tests only _CHUNKED.
_NOT_STARTED = 0
_CHUNKED = 1
_HEAD_WAITS = 5  # chunked; the head is not yet written, so that it can be sent together with the first body bytes
_PLAIN = 2  # HTTP/1.0: closing the connection ends the response
_SILENT = 3  # the response to HEAD, or the client has disconnected
_ENDED = 4

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT = b"3\r\n:\n\n\r\n"  # a comment of server-sent events, as a chunk
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")


class ExchangeConnection(Protocol):
    """What an HttpRequest needs from the connection that carries it."""

    transport: asyncio.Transport

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def exchange_ended(self, keep_alive: bool) -> None: ...

    def cut(self) -> None: ...

    @property
    def paused(self) -> bool: ...

    @property
    def draining(self) -> bool: ...


class HttpRequest:
    """A client's request and its response.

    Respond with `respond()`, or with `start()`, any number of `write()` and `finish()`. These methods do nothing after the
    client has disconnected (`gone`).
    """

    __slots__ = (
        "_carrier",
        "_framing",
        "_head_waiting",
        "_minor",
        "_tail",
        "_transport",
        "account",
        "begun",
        "body",
        "caller",
        "gone",
        "head",
        "keep_alive",
        "method",
        "more_headers",
        "num_held",
        "on_gone",
        "on_pause",
        "on_preempt",
        "on_resume",
        "path",
        "peer",
        "started",
        "task",
    )

    task: asyncio.Task[None]  # runs the handler; set by the server
    account: str  # its share of the body budget holds `num_held` bytes for this request; set by the connection
    num_held: int
    answer_name: str = (
        ""  # set if other gateways may run this request too: its prompt is billed once for all runs of this name
    )

    def __init__(
        self, head: RequestHead, body: bytes, peer: str, carrier: ExchangeConnection, caller: Any = None
    ) -> None:
        self.head = head
        self.method = head.method
        self.path = head.path
        self.keep_alive = head.keep_alive
        self.body = body
        self.peer = peer
        self.caller = caller  # what the gate found out about the sender
        self.begun: Any = None  # the stream that this request continues or lets another gateway continue
        self.more_headers = _NO_HEADERS  # sent with every response, also one that this server makes itself
        self.started = False
        self.gone = False
        self.on_gone: Callable[[], object] | None = None
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None
        # Called when the gateway needs the worker for a request that matters more. None: this one runs to its end.
        self.on_preempt: Callable[[], object] | None = None
        self._minor = head.minor
        self._carrier = carrier
        self._transport = carrier.transport
        self._framing = _NOT_STARTED
        self._head_waiting = _NO_HEADERS
        self._tail = b"\n\n"  # the latest body bytes

    def header(self, name: bytes) -> bytes | None:
        """Return the value of the first header with this lower-case name."""
        return self.head.by_name.get(name)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return self.head.headers

    @property
    def query(self) -> bytes:
        return self.head.query

    @property
    def finished(self) -> bool:
        return self._framing == _ENDED

    @property
    def paused(self) -> bool:
        """Return True while the write buffer is full. The handler should then wait for `on_resume`."""
        return self._carrier.paused

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a complete response; content-length is added here."""
        if self.gone:
            return
        connection = self._begin()
        block = headers if isinstance(headers, bytes) else header_block(headers)
        head = b"%bcontent-length: %d\r\n%b%b\r\n" % (STATUS_LINES[status], len(body), block, connection)
        if status in _BODILESS:
            head = head.replace(b"content-length: %d\r\n" % len(body), b"", 1)
            self._transport.write(head)
        elif self.method == b"HEAD" or not body:
            self._transport.write(head)
        elif len(body) < 16384:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        self._end()

    def start(self, status: int, headers: Headers) -> None:
        if self.gone:
            return
        bodiless = self.method == b"HEAD" or status in _BODILESS
        if not bodiless and self._minor == 0:
            self.keep_alive = False
        connection = self._begin()
        block = headers if isinstance(headers, bytes) else header_block(headers)
        if not bodiless and self._minor == 1:
            self._framing = _HEAD_WAITS
            self._head_waiting = b"%btransfer-encoding: chunked\r\n%b%b\r\n" % (STATUS_LINES[status], block, connection)
            self._carrier.loop.call_soon(self._flush)
            return
        self._framing = _SILENT if bodiless else _PLAIN
        self._transport.write(b"%b%b%b\r\n" % (STATUS_LINES[status], block, connection))

    def write(self, data: bytes) -> None:
        if self._framing == _CHUNKED and data:
            self._tail = data
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        elif self._framing == _HEAD_WAITS and data:
            self._framing = _CHUNKED
            self._tail = data
            self._transport.write(b"%b%x\r\n%b\r\n" % (self._head_waiting, len(data), data))
        elif self._framing == _PLAIN:
            self._transport.write(data)
        elif self._framing in (_NOT_STARTED, _ENDED) and not self.gone:
            raise RuntimeError("write() outside of start() and finish()")

    def finish(self) -> None:
        if self.gone:
            return
        if self._framing in (_NOT_STARTED, _ENDED):
            raise RuntimeError("finish() without start(), or twice")
        if self._framing == _CHUNKED:
            self._transport.write(b"0\r\n\r\n")
        elif self._framing == _HEAD_WAITS:
            self._transport.write(self._head_waiting + b"0\r\n\r\n")
        self._end()

    def probe(self) -> None:
        """Send bytes that every client ignores, where this is possible: if the client is closed, its kernel replies.

        Before the response this is an interim response. Between two events of a stream it is a comment.
        """
        if self._framing == _NOT_STARTED and self._minor == 1:
            self._transport.write(_CONTINUE)
        elif self._framing == _CHUNKED and self._is_between_events():
            self._transport.write(_COMMENT)

    def abort(self) -> None:
        """Close the connection now, so that the client sees an incomplete response. `on_gone` is not called."""
        if self.gone or self._framing == _ENDED:
            return
        self._leave()
        self._carrier.cut()

    def lose(self) -> None:
        """Called by the connection when the client has disconnected."""
        if self.gone or self._framing == _ENDED:
            return
        on_gone = self.on_gone
        self._leave()
        if on_gone is not None:
            on_gone()

    def _is_between_events(self) -> bool:
        return self._tail.endswith(_EVENT_ENDS) and b"content-type: text/event-stream" in self._head_waiting

    def _flush(self) -> None:
        if self._framing == _HEAD_WAITS:
            self._framing = _CHUNKED
            self._transport.write(self._head_waiting)

    def _begin(self) -> bytes:
        """Return `more_headers` and the `connection` header line of the response, where one is needed."""
        if self._framing != _NOT_STARTED:
            raise RuntimeError("the response was already started")
        self.started = True
        if self._carrier.draining:
            self.keep_alive = False
        if not self.keep_alive:
            return b"connection: close\r\n" + self.more_headers
        return self.more_headers if self._minor == 1 else b"connection: keep-alive\r\n" + self.more_headers

    def _end(self) -> None:
        self._framing = _ENDED
        self.on_gone = self.on_pause = self.on_resume = None
        self._carrier.exchange_ended(self.keep_alive)

    def _leave(self) -> None:
        self.gone = True
        self._framing = _SILENT
        self.on_gone = self.on_pause = self.on_resume = None

"""The client side of one connection to a worker, and the response that arrives on it.

Body bytes go from the protocol callback directly into the reader's sink, without a task, queue or timer per chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

from stoker.gateway.http.chunked import ChunkedReader
from stoker.gateway.http.errors import BadMessage, ResponseAborted, ResponseLost, ResponseTimeout, ResponseTooLarge
from stoker.gateway.http.head import CHUNKED, UNTIL_CLOSE, HeadParser, ResponseHead
from stoker.gateway.http.limits import ClientLimits

_MAX_INTERIM = 8  # 1xx responses that may precede the final response


class WorkerResponse:
    """A worker's response. Consume the body once, with `whole()`, `read()` or `relay()`. `abort()` works at any time."""

    __slots__ = (
        "_connection",
        "_error",
        "_held",
        "_kept",
        "_kept_bytes",
        "_paused",
        "_waiter",
        "ended",
        "head",
        "sink",
        "status",
    )

    def __init__(self, head: ResponseHead, connection: WorkerConnection) -> None:
        self.head = head
        self.status = head.status
        self.ended = False  # no more bytes will arrive: the body is complete, or the connection was closed
        self.sink: Callable[[bytes], None] | None = None
        self._connection = connection
        self._error: Exception | None = None
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._held = False  # reading is paused because no reader consumes the body yet
        self._paused = False  # reading is paused because the reader called pause()
        self._waiter: asyncio.Future[None] | None = None

    def header(self, name: bytes) -> bytes | None:
        """Return the value of the first header with this lower-case name."""
        return self.head.by_name.get(name)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return self.head.headers

    def whole(self, limit_bytes: int) -> bytes | None:
        """Return the body if it has arrived completely, else None; `read()` waits for it."""
        if not self.ended or self._error is not None or self._kept_bytes > limit_bytes:
            return None
        kept, self._kept = self._kept, []
        return kept[0] if len(kept) == 1 else b"".join(kept)

    async def read(self, limit_bytes: int) -> bytes:
        """Return the whole body. Raises ResponseTooLarge if it exceeds the limit."""
        body = self.whole(limit_bytes)
        if body is not None:
            return body
        collected = bytearray()  # not a list of pieces: a worker may send single bytes

        def collect(data: bytes) -> None:
            if len(collected) + len(data) > limit_bytes:
                raise ResponseTooLarge(f"the worker's response is larger than {limit_bytes} bytes")
            collected.extend(data)

        await self.relay(collect)
        return bytes(collected)

    async def relay(self, sink: Callable[[bytes], None]) -> None:
        """Feed the body to `sink` as it arrives, and return at its end.

        An exception raised by `sink` aborts the response and is raised here.
        """
        try:
            if self._kept:
                kept, self._kept = b"".join(self._kept), []
                if kept:
                    sink(kept)
            if not self.ended:
                self.sink = sink
                if self._held:
                    self._held = False
                    self._update_reading()
                self._waiter = waiter = self._connection.loop.create_future()
                await waiter
        except BaseException:
            # Also when the relaying task is cancelled: without a reader, the worker must stop generating.
            self.abort()
            raise
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """Stop reading from the worker. Bytes that have already arrived may still reach the sink."""
        self._paused = True
        self._update_reading()

    def resume(self) -> None:
        self._paused = False
        self._update_reading()

    def abort(self) -> None:
        """Close the connection, which tells the worker to stop generating."""
        if not self.ended:
            self.end(ResponseAborted("the gateway aborted the response"))
            self._connection.cut()

    # ---- called by the connection

    def end(self, error: Exception | None) -> None:
        self.ended = True
        self._error = error
        self.sink = None
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    @property
    def stopped(self) -> bool:
        return self._paused or self._held

    def keep(self, data: bytes) -> None:
        """Buffer bytes that arrive before a reader is attached."""
        self._kept.append(data)
        self._kept_bytes += len(data)
        if self._kept_bytes > self._connection.limits.read_ahead_bytes and not self._held:
            self._held = True
            self._update_reading()

    def _update_reading(self) -> None:
        if self.ended:
            return
        if self.stopped:
            self._connection.transport.pause_reading()
        else:
            self._connection.transport.resume_reading()


class OwningPool(Protocol):
    """What a WorkerConnection needs from its pool."""

    heads: HeadParser
    limits: ClientLimits
    where: str

    def release(self, connection: WorkerConnection) -> None: ...

    def forget(self, connection: WorkerConnection) -> None: ...


class WorkerConnection(asyncio.Protocol):
    """One keep-alive connection to a worker; it carries one request at a time."""

    __slots__ = (
        "_answer",
        "_buffer",
        "_first_s",
        "_got_bytes",
        "_idle_s",
        "_keep_alive",
        "_left",
        "_num_interim",
        "_owner",
        "_quiet_s",
        "_quiet_since",
        "_reader",
        "_to_head",
        "_waiter",
        "deadline",
        "idle_since",
        "is_proving",
        "limits",
        "loop",
        "reused",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, owner: OwningPool, loop: asyncio.AbstractEventLoop) -> None:
        self.limits = owner.limits
        self.loop = loop
        self.reused = False
        self.is_proving = False  # the worker has not proven yet that it has the fleet's secret
        self.idle_since = 0.0
        self.deadline: float | None = None  # for the response head, while one is awaited
        self._owner = owner
        self._waiter: asyncio.Future[WorkerResponse | None] | None = None  # resolved with the response head
        self._answer: WorkerResponse | None = None
        self._reader: ChunkedReader | None = None
        self._left = 0  # bytes left of a body with content-length; UNTIL_CLOSE without one
        self._buffer = bytearray()
        self._first_s: float | None = None  # longest wait for the first byte of the body
        self._idle_s: float | None = None  # longest pause after that
        self._quiet_s: float | None = None  # the one of the two that applies now
        self._quiet_since = 0.0
        self._got_bytes = False  # since the last check
        self._keep_alive = True
        self._to_head = False
        self._num_interim = 0

    def send(
        self,
        head: bytes,
        body: bytes,
        *,
        to_head: bool,
        deadline: float | None,
        first_s: float | None = None,
        idle_s: float | None = None,
    ) -> asyncio.Future[WorkerResponse | None]:
        """Write the request. The future yields the response, or None if a reused connection was already closed.

        `deadline` is for the head of the response, `first_s` for the first byte of its body after that, and `idle_s` for
        each pause in the body.
        """
        self._to_head = to_head
        self._first_s, self._idle_s = first_s, idle_s
        self._num_interim = 0
        self.deadline = deadline
        self._waiter = waiter = self.loop.create_future()
        if len(body) < 16384:
            self.transport.write(head + body if body else head)
        else:
            self.transport.writelines((head, body))
        return waiter

    def cut(self) -> None:
        self._waiter = self._answer = self._reader = None
        self.transport.abort()

    def check_deadlines(self, now: float) -> None:
        """End a response that is late. It is called at intervals, so a limit takes effect late by one interval at most."""
        if self.deadline is not None:
            if self.deadline < now:
                self._fail("no response before the deadline", ResponseTimeout)
            return
        answer = self._answer
        if answer is None:
            return
        if self._got_bytes:
            self._got_bytes, self._quiet_s, self._quiet_since = False, self._idle_s, now
        elif answer.stopped:
            self._quiet_since = now  # a pause that the reader asked for
        elif self._quiet_s is not None and now - self._quiet_since > self._quiet_s:
            self._fail(f"no data for {self._quiet_s:g} s", ResponseTimeout)

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from asyncio's

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            self._read_head(data)
            return
        self._got_bytes = True
        reader = self._reader
        if reader is None:
            self._read_plain(answer, data)
            return
        if answer.sink is None:
            self._read_chunks(answer, reader, data)
            return
        # The hot path: a chunk of a stream with a reader attached. It is inlined here for speed.
        try:
            payload = reader.feed(data)
            if payload:
                answer.sink(payload)
        except Exception as failed:
            self._stop(failed)
            return
        if reader.done and not answer.ended:
            self._end_chunks(answer, reader)

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.forget(self)
        if self._answer is not None:
            answer, self._answer = self._answer, None
            if self._left == UNTIL_CLOSE and self._reader is None and exc is None:
                answer.end(None)
            else:
                answer.end(
                    ResponseLost(f"{self._owner.where}: the connection closed in mid-response ({exc or 'closed'})")
                )
        elif self._waiter is not None and not self._waiter.done():
            if self.reused and not self._buffer and self._num_interim == 0:
                self._waiter.set_result(None)
            else:
                self._waiter.set_exception(
                    ResponseLost(f"{self._owner.where}: the connection closed before a response ({exc or 'closed'})")
                )
        self._waiter = None

    # ---- reading

    def _read_head(self, data: bytes) -> None:
        if self._waiter is None or self._waiter.cancelled():
            # Either no request was sent, or the sender was cancelled in this turn of the event loop. In the second case the
            # sender will cut this connection, so it must not serve another request in the meantime.
            self.cut()
            return
        searched = 0
        if self._buffer:
            searched = max(0, len(self._buffer) - 3)
            self._buffer += data
            if len(self._buffer) <= self.limits.max_head_bytes and self._buffer.find(b"\r\n\r\n", searched) < 0:
                self._check_start(self._buffer)
                return
            data, self._buffer = bytes(self._buffer), bytearray()
        limit = self.limits.max_head_bytes
        while True:
            end = data.find(b"\r\n\r\n", searched)
            searched = 0
            if end > limit or (end < 0 and len(data) > limit):
                self._fail(f"the response head is larger than {limit} bytes")
                return
            if end < 0:
                self._buffer = bytearray(data)
                self._check_start(self._buffer)
                return
            try:
                head, length = self._owner.heads.response(data[:end])
            except BadMessage as bad:
                self._fail(bad.reason)
                return
            data = data[end + 4 :]
            if head.status >= 200:
                break
            self._num_interim += 1
            if head.status == 101 or self._num_interim > _MAX_INTERIM:
                self._fail(f"unexpected interim response with status {head.status}")
                return
        self._begin(head, length if head.has_body and not self._to_head else 0, data)

    def _check_start(self, data: bytearray) -> None:
        if not b"HTTP/1.".startswith(data[:7]):
            self._fail(f"the response is not HTTP: {bytes(data[:40])!r}")

    def _begin(self, head: ResponseHead, length: int, data: bytes) -> None:
        waiter, self._waiter = self._waiter, None
        assert waiter is not None
        self.deadline = None
        self._got_bytes, self._quiet_s, self._quiet_since = bool(data), self._first_s, self.loop.time()
        self._keep_alive = head.keep_alive
        self._answer = answer = WorkerResponse(head, self)
        if not waiter.done():
            waiter.set_result(answer)
        if length == CHUNKED:
            self._reader = reader = ChunkedReader()
            if data:
                self._read_chunks(answer, reader, data)
            return
        self._left = length
        if len(data) == length:  # the usual case for short responses
            answer.keep(data)
            self._complete(answer)
        elif data:
            self._read_plain(answer, data)

    def _read_chunks(self, answer: WorkerResponse, reader: ChunkedReader, data: bytes) -> None:
        try:
            answer.keep(reader.feed(data))
        except BadMessage as bad:
            self._stop(bad)
            return
        if reader.done:
            self._end_chunks(answer, reader)

    def _end_chunks(self, answer: WorkerResponse, reader: ChunkedReader) -> None:
        if reader.rest:
            self._keep_alive = False
        self._complete(answer)

    def _read_plain(self, answer: WorkerResponse, data: bytes) -> None:
        left = self._left
        if left != UNTIL_CLOSE:
            if len(data) > left:
                # Bytes after the end: the response is valid, but the connection must not be reused.
                self._keep_alive = False
                data = data[:left]
            self._left = left = left - len(data)
        try:
            if answer.sink is None:
                answer.keep(data)
            elif data:
                answer.sink(data)
        except Exception as failed:
            self._stop(failed)
            return
        if left == 0 and not answer.ended:
            self._complete(answer)

    def _complete(self, answer: WorkerResponse) -> None:
        self._answer = self._reader = None
        if answer.stopped:
            # Nothing else resumes reading, and a connection that does not read never notices that the worker closed it.
            self.transport.resume_reading()
        if self.transport.get_write_buffer_size():
            # The worker answered before the whole request was sent. The rest is not needed, and close() would wait for it.
            self.transport.abort()
        elif self._keep_alive:
            self._owner.release(self)
        else:
            self.transport.close()
        answer.end(None)

    def _fail(self, why: str, kind: type[ResponseLost] = ResponseLost) -> None:
        lost = kind(f"{self._owner.where}: {why}")
        if self._answer is not None:
            self._answer.end(lost)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(lost)
        self.cut()

    def _stop(self, failed: Exception) -> None:
        """End the body with an error: the worker's bad framing, or the sink's exception, which `relay()` raises."""
        if isinstance(failed, BadMessage):
            self._fail(failed.reason)
            return
        if self._answer is not None:
            self._answer.end(failed)
        self.cut()

"""One answer as server-sent events, to a client that may read slowly, stop reading, or leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from aiohttp import web

from stoker.proto.openai.answers import ErrorAnswer
from stoker.proto.openai.handoff import KvTransferParams
from stoker.proto.sse import DONE, encode_event
from stoker.worker.errors import ClientStalled, Problem
from stoker.worker.generate import Piece
from stoker.worker.journal import Journal

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies that would gather events first: do not
}
_HIGH_WATER_BYTES = 64 << 10  # asyncio's and uvloop's: with less buffered there is nothing to wait for


def chat_error_event(problem: Problem) -> bytes:
    return encode_event(msgspec.json.encode(ErrorAnswer(problem.body)))


class SseStream:
    """Starts with the first event: until then an error can still have a status of its own.

    Only `room` waits: for the response to begin, and for a client that does not read; it gives up after `stall_s`. What is
    sent meanwhile lies in the transport's own buffer: full at 64 KiB, `send` says so.
    """

    def __init__(
        self,
        request: web.Request,
        stall_s: float,
        journal: Journal,
        error_event: Callable[[Problem], bytes] = chat_error_event,
    ) -> None:
        self._request = request
        self._journal = journal
        self._stall_s = stall_s
        self._error_event = error_event
        self._early: list[bytes] = []  # sent before the response has begun
        self._transport: asyncio.Transport | None = None  # once it has
        self._is_chunked = True
        self._opening = asyncio.Lock()  # several choices may wait for room
        self.response = web.StreamResponse(headers=_HEADERS)

    @property
    def started(self) -> bool:
        return self.response.prepared

    def send(self, piece: Piece, events: bytes) -> bool:
        """The events that `piece` made, if any, behind the journal's lines about it. False: wait for `room` now."""
        return self._write(self._journal.lines(piece), events)

    async def room(self) -> None:
        try:
            async with asyncio.timeout(self._stall_s), self._opening:
                if self._transport is None:
                    await self._begin()
                await self._request.writer.drain()
        except TimeoutError:
            raise ClientStalled(f"The client read nothing for {self._stall_s:g} s.") from None

    async def done(self, events: bytes) -> web.StreamResponse:
        """The last events, and the mark that they were."""
        self._write(self._journal.end(), events + DONE)
        return await self.end()

    async def hand_off(self, transfer: KvTransferParams) -> web.StreamResponse:
        """The rest comes from elsewhere: no end here."""
        self._write(self._journal.handed_off(transfer), b"")
        return await self.end()

    async def fail(self, problem: Problem) -> web.StreamResponse:
        """The error as the stream's last event; no [DONE] follows, and the connection closes."""
        self.response.force_close()
        self._write(self._journal.failed(problem), self._error_event(problem))
        return await self.end()

    async def end(self) -> web.StreamResponse:
        if not self.started and not self._early:
            self._write(b"", b"\n")  # all had been said before: an empty stream, but a stream
        await self.room()
        try:
            async with asyncio.timeout(self._stall_s):
                await self.response.write_eof()
        except TimeoutError:
            raise ClientStalled(f"The client read nothing for {self._stall_s:g} s.") from None
        return self.response

    def _write(self, lines: bytes, events: bytes) -> bool:
        """`lines` are comments that belong to the events; without events they make a block of their own."""
        if lines:
            events = lines + (events or b"\n")
        if not events:
            return True
        transport = self._transport
        if transport is None:
            self._early.append(events)
            return False
        if transport.is_closing():
            raise ConnectionResetError("the client has gone")
        # Past aiohttp's own writer, whose coroutines would cost more than the token's text.
        transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._is_chunked else events)
        return transport.get_write_buffer_size() < _HIGH_WATER_BYTES

    async def _begin(self) -> None:
        await self.response.prepare(self._request)
        self._is_chunked = self.response.headers.get("Transfer-Encoding") == "chunked"  # not in HTTP/1.0
        early, self._early = b"".join(self._early), []
        self._transport = self._request.transport
        await self.response.write(early)


STREAM = web.RequestKey("stream", SseStream)


def open_stream(
    request: web.Request,
    stall_s: float,
    journal: Journal,
    error_event: Callable[[Problem], bytes] = chat_error_event,
) -> SseStream:
    """The request's stream, where the app's error handler finds it."""
    stream = request[STREAM] = SseStream(request, stall_s, journal, error_event)
    return stream

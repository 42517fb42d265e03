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
_HIGH_WATER_BYTES = 64 << 10  # asyncio's and uvloop's: a transport with less buffered makes no writer wait


def chat_error_event(problem: Problem) -> bytes:
    return encode_event(msgspec.json.encode(ErrorAnswer(problem.body)))


class SseStream:
    """Starts with the first event: until then an error can still have a status of its own.

    Nothing is buffered here: a write waits once the transport's own buffer (64 KiB) is full, and gives up after
    `stall_s`.
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
        self.response = web.StreamResponse(headers=_HEADERS)

    @property
    def started(self) -> bool:
        return self.response.prepared

    async def send(self, piece: Piece, events: bytes) -> None:
        """The events that `piece` made, if any, behind the journal's lines about it."""
        await self._write(self._journal.lines(piece), events)

    async def done(self, events: bytes) -> web.StreamResponse:
        """The last events, and the mark that they were."""
        await self._write(self._journal.end(), events + DONE)
        return await self.end()

    async def hand_off(self, transfer: KvTransferParams) -> web.StreamResponse:
        """The rest comes from elsewhere: no end here."""
        await self._write(self._journal.handed_off(transfer), b"")
        return await self.end()

    async def fail(self, problem: Problem) -> web.StreamResponse:
        """The error as the stream's last event; no [DONE] follows, and the connection closes."""
        self.response.force_close()
        await self._write(self._journal.failed(problem), self._error_event(problem))
        return await self.end()

    async def end(self) -> web.StreamResponse:
        if not self.started:
            await self._write(b"", b"\n")  # all had been said before: an empty stream, but a stream
        try:
            async with asyncio.timeout(self._stall_s):
                await self.response.write_eof()
        except TimeoutError:
            raise ClientStalled(f"The client read nothing for {self._stall_s:g} s.") from None
        return self.response

    async def _write(self, lines: bytes, events: bytes) -> None:
        """`lines` are comments that belong to the events; without events they make a block of their own."""
        if lines:
            events = lines + (events or b"\n")
        if not events:
            return
        if self.response.prepared and self._fits(len(events)):
            await self.response.write(events)  # cannot wait: a timer for each token would cost more than its text
            return
        try:
            async with asyncio.timeout(self._stall_s):
                if not self.response.prepared:
                    await self.response.prepare(self._request)
                await self.response.write(events)
        except TimeoutError:
            raise ClientStalled(f"The client read nothing for {self._stall_s:g} s.") from None

    def _fits(self, num_bytes: int) -> bool:
        transport = self._request.transport
        return transport is None or transport.get_write_buffer_size() + num_bytes < _HIGH_WATER_BYTES


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

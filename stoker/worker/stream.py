"""One answer as server-sent events, to a client that may read slowly, stop reading, or leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec
from aiohttp import web

from stoker.proto.openai import ErrorAnswer
from stoker.proto.sse import encode_event
from stoker.worker.errors import ClientStalled, Problem

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies that would gather events first: do not
}
_HIGH_WATER_BYTES = 64 << 10  # asyncio's and uvloop's: a transport with less buffered makes no writer wait


def chat_error_event(problem: Problem) -> bytes:
    return encode_event(msgspec.json.encode(ErrorAnswer(problem.body)))


class HasLines(Protocol):
    """What of a journal is needed here."""

    def failed(self, problem: Problem) -> bytes: ...


class SseStream:
    """Starts with the first event: until then an error can still have a status of its own.

    Nothing is buffered here: `send` waits once the transport's own buffer (64 KiB) is full, and gives up after
    `stall_s`.
    """

    def __init__(
        self,
        request: web.Request,
        stall_s: float,
        journal: HasLines,
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

    async def send(self, events: bytes, lines: bytes = b"") -> None:
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

    async def end(self) -> web.StreamResponse:
        try:
            async with asyncio.timeout(self._stall_s):
                await self.response.write_eof()
        except TimeoutError:
            raise ClientStalled(f"The client read nothing for {self._stall_s:g} s.") from None
        return self.response

    async def fail(self, problem: Problem) -> web.StreamResponse:
        """The error as the stream's last event; no [DONE] follows, and the connection closes."""
        self.response.force_close()
        await self.send(self._error_event(problem), self._journal.failed(problem))
        return await self.end()


STREAM = web.RequestKey("stream", SseStream)


def open_stream(
    request: web.Request,
    stall_s: float,
    journal: HasLines,
    error_event: Callable[[Problem], bytes] = chat_error_event,
) -> SseStream:
    """The request's stream, where the app's error handler finds it."""
    stream = request[STREAM] = SseStream(request, stall_s, journal, error_event)
    return stream

"""Sends one answer as server-sent events, to a client that may read slowly, stop reading, or disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from stoker.proto.handoff import KvTransferParams
from stoker.proto.openai.errors import HttpError
from stoker.proto.sse import DONE
from stoker.worker.errors import ClientStalled
from stoker.worker.generate import AnswerPiece
from stoker.worker.note_writer import NoteWriter

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # tells nginx not to buffer events
}
_HIGH_WATER_BYTES = 64 << 10  # the limit of asyncio and uvloop: `drain` does not wait below it


class SseStream:
    """The response to one request. It starts with the first event: before that, an error can still have its own status.

    Only `wait_for_room` waits: for the response to start, and for a client that does not read, up to `stall_s`. `send` only
    adds events to the transport's buffer, and returns False when it holds 64 KiB.
    """

    def __init__(
        self,
        request: web.Request,
        stall_s: float,
        notes: NoteWriter,
        error_event: Callable[[HttpError], bytes],
    ) -> None:
        self._request = request
        self._notes = notes
        self._stall_s = stall_s
        self._error_event = error_event
        self._early: list[bytes] = []  # sent before the response started
        self._transport: asyncio.Transport | None = None  # None until the response has started
        self._is_chunked = True
        self._opening = asyncio.Lock()  # several choices may wait at the same time
        self.response = web.StreamResponse(headers=_HEADERS)

    @property
    def started(self) -> bool:
        return self.response.prepared

    def send(self, piece: AnswerPiece, events: bytes) -> bool:
        """Send the events of `piece`, if any, after the notes about it. False: await `wait_for_room` now."""
        return self._write(self._notes.of_piece(piece), events)

    async def wait_for_room(self) -> None:
        try:
            async with asyncio.timeout(self._stall_s), self._opening:
                if self._transport is None:
                    await self._begin()
                await self._request.writer.drain()
        except TimeoutError:
            raise ClientStalled(f"The client read nothing for {self._stall_s:g} s.") from None

    async def done(self, events: bytes) -> web.StreamResponse:
        """Send the last events and [DONE]."""
        self._write(self._notes.of_end(), events + DONE)
        return await self.end()

    async def hand_off(self, transfer: KvTransferParams) -> web.StreamResponse:
        """End this part of the stream. Another worker sends the rest."""
        self._write(self._notes.of_handoff(transfer), b"")
        return await self.end()

    async def fail(self, error: HttpError) -> web.StreamResponse:
        """Send the error as the last event. No [DONE] follows, and the connection closes."""
        self.response.force_close()
        self._write(self._notes.of_error(error), self._error_event(error))
        return await self.end()

    async def end(self) -> web.StreamResponse:
        if not self.started and not self._early:
            self._write(b"", b"\n")  # the client has everything already: the stream is empty
        await self.wait_for_room()
        try:
            async with asyncio.timeout(self._stall_s):
                await self.response.write_eof()
        except TimeoutError:
            raise ClientStalled(f"The client read nothing for {self._stall_s:g} s.") from None
        return self.response

    def _write(self, notes: bytes, events: bytes) -> bool:
        """Write the notes and the events that they belong to. Notes without an event end with a blank line."""
        if notes:
            events = notes + (events or b"\n")
        if not events:
            return True
        transport = self._transport
        if transport is None:
            self._early.append(events)
            return False
        if transport.is_closing():
            raise ConnectionResetError("the client has disconnected")
        # Not through aiohttp's writer: its coroutines cost more than encoding the token.
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
    notes: NoteWriter,
    error_event: Callable[[HttpError], bytes],
) -> SseStream:
    """Create the stream of a request and store it there for the error handler of the app."""
    stream = request[STREAM] = SseStream(request, stall_s, notes, error_event)
    return stream

"""The clock of the series, and `GET /admin/stream`: the state of each second as server-sent events.

All viewers get the same bytes, which are made once per second, and only while there is a viewer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from stoker.base.errors import Overloaded
from stoker.base.long_task import TaskErrors, repeat
from stoker.gateway.admission.admin_access import admin_refusal
from stoker.gateway.admission.api_keys import AdminToken
from stoker.gateway.api.endpoint import EndpointRequest
from stoker.gateway.api.reply import Reply, method_not_allowed
from stoker.gateway.http import HttpRequest
from stoker.gateway.insight.insight_book import InsightBook

STREAM_PATH = b"/admin/stream"
_MAX_VIEWERS = 32
_LONGEST_S = 600.0  # then the stream ends, and the page opens another one
_SETTLE_S = 0.1  # after a tick: the gateway's other processes have ticked by then
_STALLED_S = 30.0  # a viewer that reads nothing for this long is disconnected
_HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]


class LiveStream:
    """Ticks the series once per second, and sends each tick to the viewers."""

    def __init__(
        self,
        token: AdminToken,
        book: InsightBook,
        read_now: Callable[[EndpointRequest], Awaitable[bytes | None]],
        errors: TaskErrors | None = None,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        """`read_now` returns the state as JSON, with the rights of a viewer's request; None if it has none any more."""
        self._token = token
        self._book = book
        self._read_now = read_now
        self._errors = errors or TaskErrors()
        # Unix time that never goes back, so that a corrected clock does not disturb the series.
        self._offset_s = unix_time() - time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self._ticked = asyncio.Event()
        self._has_event = asyncio.Event()
        self._viewers: list[HttpRequest] = []
        self._event = b""

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        for name, turn in (("insight", self._tick), ("insight_stream", self._read)):
            self._tasks.append(loop.create_task(repeat(name, turn, self._errors), name=name))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def answer(self, request: HttpRequest) -> Reply | None:
        """Send the stream. A reply is returned only if the request is refused."""
        refusal = admin_refusal(self._token, request)
        if refusal is not None:
            return refusal
        if request.method != b"GET":
            return method_not_allowed(request.path, request.method, [b"GET"])
        if len(self._viewers) >= _MAX_VIEWERS:
            message = f"{_MAX_VIEWERS} streams of /admin/stream are open, which is the limit; close one."
            raise Overloaded(message, retry_after_s=10.0, code="too_many_streams")
        request.on_gone = request.task.cancel
        self._viewers.append(request)
        try:
            await self._send(request)
        except asyncio.CancelledError:
            if not request.gone:
                raise
        finally:
            self._viewers.remove(request)
        return None

    async def _send(self, request: HttpRequest) -> None:
        request.start(200, _HEADERS)
        request.write(_event(await self._read_now(request)))
        began_s = read_s = time.monotonic()
        while (now := time.monotonic()) - began_s < _LONGEST_S:
            await self._has_event.wait()
            if not request.paused:
                request.write(self._event)
                read_s = now
            elif now - read_s > _STALLED_S:
                request.abort()
                return
        request.finish()

    async def _tick(self) -> None:
        now_s = time.monotonic() + self._offset_s
        await asyncio.sleep(1.0 - now_s % 1.0)
        self._book.tick(time.monotonic() + self._offset_s - 0.5)  # the second that has just ended
        ticked, self._ticked = self._ticked, asyncio.Event()
        ticked.set()

    async def _read(self) -> None:
        """Make the event of a tick. The ticks do not wait for it: another process may be slow to answer."""
        await self._ticked.wait()
        await asyncio.sleep(_SETTLE_S)
        body = None
        for viewer in self._viewers[::-1]:  # the token of an earlier one may have been withdrawn
            body = await self._read_now(viewer)
            if body is not None:
                break
        self._event = _event(body)
        has_event, self._has_event = self._has_event, asyncio.Event()
        has_event.set()


def _event(body: bytes | None) -> bytes:
    return b": nothing is known\n\n" if body is None else b"data: " + body.rstrip() + b"\n\n"

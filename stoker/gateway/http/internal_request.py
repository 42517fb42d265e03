"""A request that the gateway sends to itself: it has no connection, and its response goes to a sink."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol, cast

from stoker.gateway.http.head import Headers, RequestHead
from stoker.gateway.http.request import _CHUNKED, _ENDED, HttpRequest

_PEER = "internal"


class AnswerSink(Protocol):
    """Takes the response to an internal request. `respond` comes alone; `start`, `write` and `finish` come in this order."""

    @property
    def paused(self) -> bool:
        """Return True if the sink wants no more data now."""

    def respond(self, status: int, headers: Headers, body: bytes) -> None: ...

    def start(self, status: int, headers: Headers) -> None: ...

    def write(self, data: bytes) -> None: ...

    def finish(self) -> None: ...


class _NoConnection:
    """Stands in for the connection of an internal request."""

    transport = cast(asyncio.Transport, None)  # never used: all methods that write are overridden
    paused = False
    draining = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def exchange_ended(self, keep_alive: bool) -> None: ...

    def cut(self) -> None: ...


_NO_CONNECTION = _NoConnection()


class InternalRequest(HttpRequest):
    """A request of the gateway's own, in the current task. `lose()` cancels it, as if a client had disconnected."""

    __slots__ = ("_sink", "answer_name")

    def __init__(self, head: RequestHead, body: bytes, caller: Any, sink: AnswerSink, answer_name: str = "") -> None:
        super().__init__(head, body, _PEER, _NO_CONNECTION, caller)
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self._sink = sink
        self.answer_name = answer_name

    @property
    def paused(self) -> bool:
        return self._sink.paused

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        if not self.gone:
            self._begin()
            self._sink.respond(status, headers, body)
            self._end()

    def start(self, status: int, headers: Headers) -> None:
        if not self.gone:
            self._begin()
            self._framing = _CHUNKED
            self._sink.start(status, headers)

    def write(self, data: bytes) -> None:
        if self._framing == _CHUNKED:
            self._sink.write(data)

    def finish(self) -> None:
        if self._framing == _CHUNKED:
            self._sink.finish()
            self._end()

    def probe(self) -> None: ...

    @property
    def is_complete(self) -> bool:
        """Return True if the response was sent to its end."""
        return self._framing == _ENDED


def internal_head(path: bytes, headers: list[tuple[bytes, bytes]]) -> RequestHead:
    """Return the head of an internal POST request."""
    head = RequestHead()
    head.method, head.path, head.query, head.minor = b"POST", path, b"", 1
    head.expects, head.keep_alive = False, True
    head.set_headers(headers)
    return head

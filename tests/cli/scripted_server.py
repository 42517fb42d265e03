"""An OpenAI-compatible server that says what a script tells it to: what is under test here is the client."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

CUT = "cut"  # drop the connection here
Piece = bytes | float | str | Callable[[], bool]


@dataclass(frozen=True)
class Reply:
    """`pieces`: bytes are sent, numbers are waited for in seconds, a condition until it holds; CUT drops the connection."""

    pieces: Sequence[Piece] = ()
    status: int = 200
    body: Any = None


def event(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload, ensure_ascii=False).encode() + b"\n\n"


def delta(**fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": None}]})


def text_event(text: str) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})


def finish(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = 0) -> list[bytes]:
    usage: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return [
        event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
        event({"choices": [], "usage": usage}),
        b"data: [DONE]\n\n",
    ]


def answer(*words: str, pause: Piece = 0.0, prompt_tokens: int = 10, cached_tokens: int | None = 4) -> Reply:
    """`pause` comes before each word."""
    pieces: list[Piece] = [delta(role="assistant", content="")]
    for word in words:
        pieces += [pause, delta(content=word)]
    return Reply([*pieces, *finish(prompt_tokens, len(words), cached_tokens)])


def failure(status: int, code: str, message: str = "no") -> Reply:
    return Reply(status=status, body={"error": {"message": message, "type": "some_error", "code": code}})


@dataclass
class Seen:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class ScriptedServer:
    script: Callable[[Seen], Reply] = lambda seen: answer("Hello", " there", ".")
    models: Sequence[str] = ("scripted",)
    seen: list[Seen] = field(default_factory=list)
    dropped: int = 0  # streams that their client left
    url: str = ""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        return app

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(request.path, dict(request.headers), await request.json())
        self.seen.append(seen)
        reply = self.script(seen)
        if reply.status != 200:
            return web.json_response(reply.body, status=reply.status)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            for piece in reply.pieces:
                if isinstance(piece, bytes):
                    await response.write(piece)
                elif piece == CUT:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                elif callable(piece):
                    while not piece():  # noqa: ASYNC110 - what it asks for happens in another thread
                        await asyncio.sleep(0.002)
                else:
                    await asyncio.sleep(float(piece))
        except (ConnectionError, asyncio.CancelledError):
            self.dropped += 1
            raise
        return response


@contextmanager
def running(server: ScriptedServer, port: int = 0) -> Iterator[ScriptedServer]:
    """On a loop and a thread of its own: the commands under test bring theirs."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    def serve() -> None:
        loop.run_until_complete(start())
        loop.call_soon(ready.set)  # in run_forever, so that no stop gets lost between the two runs
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)


if __name__ == "__main__":
    with running(ScriptedServer(lambda seen: answer("a", "b", "c", pause=0.002)), int(sys.argv[1])):
        threading.Event().wait()

"""Mock workers for tests of the gateway: they record their requests and answer according to a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from waiting import LONG_S

from stoker.gateway.http import HttpRequest, Server, ServerLimits

Script = Callable[["MockWorker", HttpRequest], Awaitable[None]]

SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]


@dataclass
class MockWorker:
    script: Script
    name: str = "w"
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    num_gone: int = 0
    num_running: int = 0
    _server: Server | None = None
    _port: int = 0

    async def start(self) -> None:
        self._server = Server(self._handle, ServerLimits(), on_bad=lambda peer, reason: None)
        await self._server.listen("127.0.0.1", self._port)
        self._port = self._server.port

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.close(0.0)

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def jsons(self) -> list[Any]:
        return [json.loads(body) for body in self.bodies]

    async def _handle(self, request: HttpRequest) -> None:
        self.bodies.append(request.body)
        self.headers.append({name.decode(): value.decode() for name, value in request.headers})
        self.paths.append(request.path.decode())
        task = asyncio.current_task()
        assert task is not None

        def gone() -> None:
            self.num_gone += 1
            task.cancel()

        request.on_gone = gone
        self.num_running += 1
        try:
            await self.script(self, request)
        except asyncio.CancelledError:
            if not request.gone:
                raise
        finally:
            self.num_running -= 1


def answers(
    body: bytes | dict[str, Any], status: int = 200, headers: list[tuple[bytes, bytes]] | None = None
) -> Script:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def script(worker: MockWorker, request: HttpRequest) -> None:
        request.respond(status, [*JSON, *(headers or [])], data)

    return script


def streams(*pieces: bytes, cut: bool = False, pause_s: float = 0.0) -> Script:
    """Send the pieces as the body of an event stream; with `cut` the connection breaks after the last."""

    async def script(worker: MockWorker, request: HttpRequest) -> None:
        request.start(200, SSE)
        for piece in pieces:
            request.write(piece)
            await asyncio.sleep(pause_s)
        if cut:
            request.abort()
        else:
            request.finish()

    return script


def drops() -> Script:
    """Accept the request and close the connection."""

    async def script(worker: MockWorker, request: HttpRequest) -> None:
        request.abort()

    return script


def hangs() -> Script:
    """Accept the request and never answer."""

    async def script(worker: MockWorker, request: HttpRequest) -> None:
        await asyncio.sleep(2 * LONG_S)

    return script


def in_turn(*scripts: Script) -> Script:
    """Use one script per request, in order; the last one serves all further requests."""
    left = list(scripts)

    async def script(worker: MockWorker, request: HttpRequest) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(worker, request)

    return script


def event(data: Any) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data, separators=(",", ":")).encode()) + b"\n\n"


def chunk(text: str, **more: Any) -> bytes:
    """One chat chunk of a foreign worker."""
    return event(
        {"id": "c1", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": text}}], **more}
    )


def usage_chunk(prompt: int, cached: int | None, completion: int) -> bytes:
    return event(
        {"id": "c1", "object": "chat.completion.chunk", "choices": [], "usage": usage(prompt, cached, completion)}
    )


def usage(prompt: int, cached: int | None, completion: int) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }


DONE = b"data: [DONE]\n\n"

"""The worker's app on a real socket, in its own thread, with a scripted engine."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import openai
import uvloop
from aiohttp import web
from fake_engine import FakeService, Script
from sse_reader import SseEvent, SseReader

from stoker.worker.app import make_app, make_runner
from stoker.worker.config import HttpConfig
from stoker.worker.context import CONTEXT, ModelText, WorkerContext
from stoker.worker.identity import Identity
from stoker.worker.state import ServerState


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        assert set(self.json) == {"error"}
        assert set(self.json["error"]) == {"message", "type", "param", "code"}
        return self.json["error"]

    @property
    def events(self) -> list[SseEvent]:
        return SseReader().push(self.body)

    @property
    def chunks(self) -> list[Any]:
        return [json.loads(event.data) for event in self.events if not event.is_done]


@dataclass
class Server:
    """A running worker. A test may change the script of its engine at any time."""

    service: FakeService
    text: ModelText
    config: HttpConfig
    port: int = 0
    identity: Identity = field(default_factory=Identity)
    clients: list[openai.OpenAI] = field(default_factory=list)
    state: ServerState = field(init=False)
    loop: asyncio.AbstractEventLoop = field(init=False)
    context: WorkerContext = field(init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)
        self.clients.append(client)
        return client

    def say(self, text: Any = "Hello, world", **options: Any) -> None:
        self.service.script = Script(text, **options)

    def send(self, path: str, body: Any = None, method: str | None = None, **headers: str) -> Answer:
        """Send `body` as it is if it is bytes, else as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        names = {"Content-Type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
        request = urllib.request.Request(self.url + path, data, names, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return Answer(answer.status, dict(answer.headers), answer.read())
        except urllib.error.HTTPError as refused:
            return Answer(refused.code, dict(refused.headers), refused.read())

    def chat(self, content: str = "Say hello", **fields: Any) -> Answer:
        """Fields with the value `...` are left out."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}]} | fields
        return self.send("/v1/chat/completions", {name: value for name, value in body.items() if value is not ...})


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "the condition never held"
        time.sleep(0.005)


def run_server(server: Server) -> Callable[[], None]:
    """Start the server and return a function that stops it."""
    up = threading.Event()
    down: asyncio.Event

    async def main() -> None:
        nonlocal down
        down = asyncio.Event()
        server.loop = asyncio.get_running_loop()
        server.state = ServerState(server.config.drain_retry_after_s)
        app = make_app(server.service, server.text, server.config, identity=server.identity, state=server.state)
        server.context = app[CONTEXT]
        runner = make_runner(app, shutdown_timeout_s=0.5)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.port = runner.addresses[0][1]
        up.set()
        await down.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: uvloop.run(main()))
    thread.start()
    assert up.wait(10)

    def stop() -> None:
        for client in server.clients:
            client.close()
        server.loop.call_soon_threadsafe(down.set)
        thread.join(10)
        assert not thread.is_alive()

    return stop

"""A real gateway with mock workers and some traffic, in a thread, for tests of the dashboard in a browser."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from mocks import JSON, SSE, MockWorker, event
from waiting import LONG_S

from stoker.base.ids import WorkerId
from stoker.fleet.spec import LoadReport
from stoker.gateway.build import build_gateway
from stoker.gateway.config import load
from stoker.gateway.gateway_server import GatewayServer
from stoker.gateway.http import ClientLimits, ConnectionPool, HttpRequest, Origin, ResponseLost, Unreachable

ADMIN = "an-admin-token-for-tests"
BLOCK_TOKENS = 16
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


@dataclass
class DemoWorker:
    """The script of a mock Stoker worker: it remembers the prompts of each session, and streams an answer."""

    models: Sequence[str]
    prefill_tokens_per_s: float = 40_000.0
    token_s: float = 0.004
    held: dict[str, str] = field(default_factory=dict)

    async def __call__(self, worker: MockWorker, request: HttpRequest) -> None:
        match request.path:
            case b"/ready" | b"/health":
                request.respond(200, JSON, b"{}")
            case b"/v1/models":
                request.respond(200, JSON, json.dumps({"data": [{"id": one} for one in self.models]}).encode())
            case b"/metrics":
                request.respond(200, [(b"content-type", b"text/plain")], self.page())
            case b"/v1/chat/completions":
                await self.chat(request)
            case _:
                request.respond(404, JSON, b"{}")

    def page(self) -> bytes:
        tier = "\n".join(
            f'stoker_kv_tier_{name}{{tier="{tier}"}} {value}'
            for tier, scale in (("host", 1), ("disk", 4))
            for name, value in (
                ("blocks", 640 * scale),
                ("used_bytes", 640 * scale * (1 << 20)),
                ("capacity_bytes", 768 * scale * (1 << 20)),
                ("hits_total", 4200 // scale),
                ("misses_total", 40),
                ("evicted_total", 1200),
                ("read_bytes_per_second", 9e9 / scale),
                ("crossover_tokens", 48 * scale),
            )
        )
        numbers = "stoker_kv_blocks 1024\nstoker_kv_blocks_cached 870\nstoker_kv_loaded_tokens_total 67200\n"
        return (numbers + tier + "\n").encode()

    async def chat(self, request: HttpRequest) -> None:
        body = json.loads(request.body)
        text = json.dumps(body["messages"])
        prompt = len(text) // 4
        session = str(body.get("user", ""))
        before = self.held.get(session, "")
        different = (i for i, (old, new) in enumerate(zip(before, text, strict=False)) if old != new)
        same = next(different, min(len(before), len(text)))
        cached = min(same // 4, prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        self.held[session] = text
        await asyncio.sleep((prompt - cached) / self.prefill_tokens_per_s)
        request.start(200, SSE)
        count = int(body.get("max_tokens") or 24)
        answer = body.get("stop") or "word"  # a test chooses the answer
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1000, "model": body.get("model")}
        for position in range(count):
            note = b":t 0 %d\n" % position
            if position == 0:
                note = b":u %d %d 1000 %d\n" % (prompt, cached, body.get("seed", 1)) + note
            choice = {"index": 0, "delta": {"content": f"{answer} "}, "finish_reason": None}
            if position == count - 1:
                note += b":f 0\n"
                choice["finish_reason"] = "stop"
            request.write(note + event({**head, "choices": [choice]}))
            await asyncio.sleep(self.token_s)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "total_tokens": prompt + count,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"accepted_prediction_tokens": 9, "rejected_prediction_tokens": 3},
        }
        request.write(b":e\n" + event({**head, "choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        request.finish()


class DemoFleet:
    """Runs in a thread of its own from `with` to its end."""

    def __init__(
        self,
        folder: Path,
        num_workers: int,
        *,
        settings: dict[str, Any] | None = None,
        models: Sequence[str] = ("kimi",),
    ) -> None:
        self._folder = folder
        self._num_workers = num_workers
        self._settings = settings or {}
        self._models = models
        self._num_plays = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="demo-fleet", daemon=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.gateway: GatewayServer

    def __enter__(self) -> DemoFleet:
        self._thread.start()
        assert self._ready.wait(LONG_S), "the gateway did not start"
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *why: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LONG_S)

    def run(self, work: Any) -> Any:
        """Run a coroutine in the fleet's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LONG_S)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._failure = error
            self._ready.set()
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        workers = self._workers = [
            MockWorker(DemoWorker(self._models), f"w{number}") for number in range(self._num_workers)
        ]
        for worker in workers:
            await worker.start()
        token = self._folder / "admin"
        token.write_text(ADMIN)
        overrides = {
            "worker": [{"url": worker.url, "dialect": "stoker"} for worker in workers],
            "admin_token_file": str(token),
            "store": str(self._folder / "store.db"),
            "price": [{"model": "*", "input": 0.6, "cached_input": 0.06, "output": 2.5}],
            "log_requests": False,
            **self._settings,
        }
        self.gateway = build_gateway(load(None, overrides))
        await self.gateway.start(self._listener)
        reports = asyncio.create_task(self._report())
        self._ready.set()
        try:
            await self._stop.wait()
        finally:
            reports.cancel()
            await asyncio.gather(reports, return_exceptions=True)
            await self.gateway.close()
            for worker in workers:
                await worker.stop()

    async def _report(self) -> None:
        """Publish the load of the workers, which real ones do with their KV events."""
        numbers = random.Random(1)
        while True:
            for number, member in enumerate(self.gateway.fleet.members()):
                used = min(0.99, 0.2 + 0.011 * number + 0.02 * numbers.random())
                report = LoadReport(
                    running_sequences=self._workers[number].num_running,
                    kv_used=used,
                    num_blocks=1024,
                    block_tokens=BLOCK_TOKENS,
                    prefill_tokens_per_s=40_000.0,
                    step_s=0.011,
                )
                clock = asyncio.get_running_loop().time
                self.gateway.fleet.saw_report(WorkerId(member.worker_id), report, clock())
            await asyncio.sleep(0.5)

    # ---- traffic

    def play(self, sessions: int, turns: int, *, words: int = 400, **fields: Any) -> None:
        """Send conversations that grow, with a sub-agent for every second one, and wait for the answers."""
        self._num_plays += 1
        self.run(self._play(sessions, turns, words, fields))

    async def _play(self, sessions: int, turns: int, words: int, fields: dict[str, Any]) -> None:
        pool = ConnectionPool(Origin.from_url(self.url), ClientLimits())
        try:
            await asyncio.gather(*(self._session(pool, number, turns, words, fields) for number in range(sessions)))
        finally:
            pool.close()

    async def _session(self, pool: ConnectionPool, number: int, turns: int, words: int, fields: dict[str, Any]) -> None:
        numbers = random.Random(f"{self._num_plays} {number}")  # each play has conversations of its own
        name = f"agent-{number // 2}" + ("-helper" if number % 2 else "")
        headers = [(b"x-session-id", name.encode()), (b"content-type", b"application/json")]
        if number % 2:
            headers.append((b"x-parent-session-id", f"agent-{number // 2}".encode()))
        text = lambda: " ".join(str(numbers.getrandbits(24)) for _ in range(words))  # noqa: E731
        messages = [{"role": "system", "content": "You are an agent. " * words}]
        for turn in range(turns):
            messages += [{"role": "user", "content": text()}]
            if number % 5 == 3 and turn == turns - 1:
                messages[1] = {"role": "user", "content": "an edited message " + text()}
            body = {
                "model": self._models[0],
                "messages": messages,
                "stream": True,
                "user": name,
                "max_tokens": 24,
                **fields,
            }
            try:
                answer = await pool.send(
                    b"POST",
                    b"/v1/chat/completions",
                    headers,
                    json.dumps(body).encode(),
                    connect_s=LONG_S,
                    head_s=LONG_S,
                )
                await answer.read(1 << 24)
            except (ResponseLost, Unreachable):
                return
            messages += [{"role": "assistant", "content": "word " * 24}]
            await asyncio.sleep(numbers.random() * 0.2)

"""Prefill and decode servers of other engines, as far as a hand-off shows them: they meet, or they do not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mocks import DONE, JSON, SSE, MockWorker, Script, chunk, event, usage, usage_chunk

from stoker.gateway.http import HttpRequest

TICKET = (
    b'{"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[3, 4, 5]], '
    b'"remote_engine_id": "e-1", "remote_request_id": "cmpl-7", "remote_host": "10.0.0.1", "remote_port": 5600, '
    b'"tp_size": 1, "remote_num_tokens": 40, "transfer_mode": "pull"}'
)


@dataclass
class Meeting:
    """Where the two halves of a pair find each other."""

    rooms: dict[Any, asyncio.Event] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)  # blocks that a prefill worker keeps for a decode worker
    prefill_s: float = 0.01

    def room(self, name: Any) -> asyncio.Event:
        return self.rooms.setdefault(name, asyncio.Event())

    # ---- vLLM, NIXL: prefill answers with a ticket, decode brings it

    def nixl_prefill(self, cached: int | None = 8, ticket: bytes = TICKET) -> Script:
        async def script(worker: MockWorker, request: HttpRequest) -> None:
            body = json.loads(request.body)
            assert body["kv_transfer_params"]["do_remote_decode"] is True
            await asyncio.sleep(self.prefill_s)
            self.held.add("cmpl-7")
            told = json.dumps({"id": "x", "choices": [], "usage": usage(40, cached, 1)}).encode()
            request.respond(200, JSON, told[:-1] + b', "kv_transfer_params": ' + ticket + b"}")

        return script

    def nixl_decode(self, pause_s: float = 0.0) -> Script:
        async def script(worker: MockWorker, request: HttpRequest) -> None:
            body = json.loads(request.body)
            ticket = body.get("kv_transfer_params")
            if ticket is not None:
                # It has seen the request: whatever happens now, it tells prefill to let go.
                await asyncio.sleep(0.01)
                self.held.discard(ticket["remote_request_id"])
            await asyncio.sleep(pause_s)
            await _answer(request, body, cached=39)

        return script

    # ---- vLLM, Mooncake: both at once, by a transfer id

    def mooncake_prefill(self, cached: int | None = 8) -> Script:
        async def script(worker: MockWorker, request: HttpRequest) -> None:
            if request.path == b"/query":
                request.respond(200, JSON, b'{"0": {"engine_id": "e-0"}}')
                return
            params = json.loads(request.body)["kv_transfer_params"]
            await asyncio.sleep(self.prefill_s)
            self.room(params["transfer_id"]).set()
            request.respond(200, JSON, json.dumps({"id": "x", "choices": [], "usage": usage(40, cached, 1)}).encode())

        return script

    def mooncake_decode(self) -> Script:
        async def script(worker: MockWorker, request: HttpRequest) -> None:
            body = json.loads(request.body)
            params = body.get("kv_transfer_params")
            if params is not None:
                await self.room(params["transfer_id"]).wait()
            await _answer(request, body, cached=39)

        return script

    # ---- SGLang: both at once, in a room

    def sglang_prefill(self, cached: int | None = 8) -> Script:
        async def script(worker: MockWorker, request: HttpRequest) -> None:
            body = json.loads(request.body)
            await asyncio.sleep(self.prefill_s)
            self.room(body["bootstrap_room"]).set()
            await _answer(request, body, cached=cached, texts=("a",))

        return script

    def sglang_decode(self) -> Script:
        async def script(worker: MockWorker, request: HttpRequest) -> None:
            body = json.loads(request.body)
            await self.room(body["bootstrap_room"]).wait()
            await _answer(request, body, cached=39)

        return script


async def _answer(
    request: HttpRequest, body: dict[str, Any], cached: int | None, texts: tuple[str, ...] = ("a", "b")
) -> None:
    if not body.get("stream"):
        whole = {
            "id": "c",
            "choices": [{"index": 0, "message": {"content": "".join(texts)}}],
            "usage": usage(40, cached, 2),
        }
        # In its bidirectional mode vLLM's decode answers with a ticket, too.
        request.respond(200, JSON, json.dumps({**whole, "kv_transfer_params": {"remote_host": "10.0.0.2"}}).encode())
        return
    request.start(200, SSE)
    for text in texts:
        request.write(chunk(text))
        await asyncio.sleep(0.002)
    request.write(event({"id": "c1", "choices": [], "kv_transfer_params": {"remote_host": "10.0.0.2"}, "x": 1}))
    if (body.get("stream_options") or {}).get("include_usage"):
        request.write(usage_chunk(40, cached, 2))
    request.write(DONE)
    request.finish()


SCRIPTS: dict[str, tuple[Callable[[Meeting], Script], Callable[[Meeting], Script]]] = {
    "vllm": (Meeting.nixl_prefill, Meeting.nixl_decode),
    "vllm_mooncake": (Meeting.mooncake_prefill, Meeting.mooncake_decode),
    "sglang": (Meeting.sglang_prefill, Meeting.sglang_decode),
}

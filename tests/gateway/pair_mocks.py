"""Mock prefill and decode servers of every dialect that has pairs: they exchange KV as the real servers do, or wait forever."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fake_stoker import FakeStoker
from mocks import DONE, JSON, SSE, MockWorker, Script, chunk, event, usage, usage_chunk
from world import World

from stoker.fleet.spec import Role
from stoker.gateway.http import HttpRequest

TICKET = (
    b'{"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[3, 4, 5]], '
    b'"remote_engine_id": "e-1", "remote_request_id": "cmpl-7", "remote_host": "10.0.0.1", "remote_port": 5600, '
    b'"tp_size": 1, "remote_num_tokens": 40, "transfer_mode": "pull"}'
)


@dataclass
class PairState:
    """What the two servers of a pair share."""

    rooms: dict[Any, asyncio.Event] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)  # leases: blocks that a prefill worker keeps for a decode worker
    prefill_s: float = 0.01

    def room(self, name: Any) -> asyncio.Event:
        return self.rooms.setdefault(name, asyncio.Event())

    # ---- vLLM with NIXL: prefill answers with a ticket, which decode presents

    def nixl_prefill(self, cached: int | None = 8, ticket: bytes = TICKET) -> Script:
        async def script(worker: MockWorker, request: HttpRequest) -> None:
            body = json.loads(request.body)
            assert body["kv_transfer_params"]["do_remote_decode"] is True
            await asyncio.sleep(self.prefill_s)
            self.held.add("cmpl-7")
            answer = json.dumps({"id": "x", "choices": [], "usage": usage(40, cached, 1)}).encode()
            request.respond(200, JSON, answer[:-1] + b', "kv_transfer_params": ' + ticket + b"}")

        return script

    def nixl_decode(self, pause_s: float = 0.0) -> Script:
        async def script(worker: MockWorker, request: HttpRequest) -> None:
            body = json.loads(request.body)
            ticket = body.get("kv_transfer_params")
            if ticket is not None:
                # From here on decode releases prefill's lease, whatever happens to the request.
                await asyncio.sleep(0.01)
                self.held.discard(ticket["remote_request_id"])
            await asyncio.sleep(pause_s)
            await _answer(request, body, cached=39)

        return script

    # ---- vLLM with Mooncake: both run at once, connected by a transfer id

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

    # ---- SGLang: both run at once, connected by a bootstrap room

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

    # ---- Stoker: prefill streams the first token and a ticket, decode continues

    def stoker_prefill(self) -> Script:
        return FakeStoker(pace_s=self.prefill_s)

    def stoker_decode(self) -> Script:
        return FakeStoker()


async def _answer(
    request: HttpRequest, body: dict[str, Any], cached: int | None, texts: tuple[str, ...] = ("a", "b")
) -> None:
    if not body.get("stream"):
        whole = {
            "id": "c",
            "choices": [{"index": 0, "message": {"content": "".join(texts)}}],
            "usage": usage(40, cached, 2),
        }
        # In its bidirectional mode, vLLM's decode server answers with a ticket too.
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


@dataclass(frozen=True)
class PairMock:
    """How a dialect's pair is simulated. `usage` is what one request must be billed: prompt, cached, completion tokens.

    The cached tokens are those that the prefill server reports; a decode server counts the blocks it received as cached.
    """

    prefill: Callable[[PairState], Script]
    decode: Callable[[PairState], Script]
    usage: tuple[int, int, int] = (40, 8, 2)
    has_bootstrap_port: bool = False  # the prefill server's own port is its bootstrap port


_NIXL = PairMock(PairState.nixl_prefill, PairState.nixl_decode)
PAIRS: dict[str, PairMock] = {
    "sglang": PairMock(PairState.sglang_prefill, PairState.sglang_decode, has_bootstrap_port=True),
    "stoker": PairMock(PairState.stoker_prefill, PairState.stoker_decode, usage=(10, 3, 8)),
    "vllm": _NIXL,
    "vllm_nixl": _NIXL,
    "vllm_mooncake": PairMock(PairState.mooncake_prefill, PairState.mooncake_decode, has_bootstrap_port=True),
}


async def add_pair(
    world: World, dialect: str, state: PairState, prefill: Script | None = None, decode: Script | None = None
) -> None:
    """Add the prefill worker "p" and the decode worker "d"."""
    mock = PAIRS[dialect]
    worker = await world.add("p", prefill or mock.prefill(state), role=Role.PREFILL, dialect=dialect)
    if mock.has_bootstrap_port:
        world.register("p", role=Role.PREFILL, dialect=dialect, bootstrap_port=worker.port)
    await world.add("d", decode or mock.decode(state), role=Role.DECODE, dialect=dialect)


def world_of_pairs() -> World:
    """A world whose prompts are long enough for a hand-off."""
    return World(prompt_tokens=5000, policy="least_tokens")

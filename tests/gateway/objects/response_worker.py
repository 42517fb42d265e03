"""A mock worker of the Responses API, and a gateway with a real store in front of it."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mocks import JSON, SSE, MockWorker
from waiting import LONG_S
from world import Got, World, _got

from stoker.gateway.admission.api_keys import new_key
from stoker.gateway.http import HttpRequest
from stoker.gateway.key_settings import KeySettings
from stoker.gateway.objects.object_settings import BatchSettings, ResponsesSettings
from stoker.gateway.objects.tenant_objects import TenantObjects
from stoker.gateway.store.sqlite import SqliteStore
from stoker.gateway.store.store_threads import StoreThreads


@dataclass
class FakeResponses:
    """Answers "turn N" where N is the number of input items. `hold` stops a stream after its first delta."""

    hold: asyncio.Event | None = None
    refuses: list[int] = field(default_factory=list)  # statuses of the next requests
    cuts: int = 0  # of the next streams
    line_end: str = "\n"

    async def __call__(self, worker: MockWorker, request: HttpRequest) -> None:
        body = json.loads(request.body)
        if self.refuses:
            error = {"error": {"message": "no", "type": "x", "param": None, "code": "overloaded"}}
            request.respond(self.refuses.pop(0), JSON, json.dumps(error).encode())
            return
        given = body["input"]
        text = f"turn {1 if isinstance(given, str) else len(given)}"
        item = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}],
        }
        usage = {
            "input_tokens": 10,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 2,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 12,
        }
        response = {"id": "resp_worker", "object": "response", "created_at": 1, "model": "m", "status": "in_progress"}
        response |= {"store": False, "background": False, "previous_response_id": None, "output": [], "usage": None}
        response |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        done = response | {"status": "completed", "output": [item], "usage": usage}
        if not body.get("stream"):
            request.respond(200, JSON, json.dumps(done).encode())
            return
        request.start(200, SSE)
        number = 0

        def send(kind: str, **fields: Any) -> None:
            nonlocal number
            data = json.dumps({"type": kind, "sequence_number": number, **fields}, separators=(",", ":"))
            request.write(f"event: {kind}\ndata: {data}\n\n".replace("\n", self.line_end).encode())
            number += 1

        send("response.created", response=response)
        send("response.in_progress", response=response)
        for i, letter in enumerate(text):
            send("response.output_text.delta", delta=letter, item_id="msg_1", output_index=0, content_index=0)
            if i == 0 and self.hold is not None:
                await self.hold.wait()
            if i == 2 and self.cuts:
                self.cuts -= 1
                request.abort()
                return
        send("response.completed", response=done)
        request.finish()


@dataclass
class Keys:
    """API keys of two tenants."""

    settings: list[KeySettings] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, *tenants: str) -> Keys:
        keys = cls()
        for tenant in tenants:
            text, digest = new_key()
            keys.settings.append(KeySettings(f"key-{tenant}", digest, tenant))
            keys.texts[tenant] = text
        return keys

    def header(self, tenant: str) -> list[tuple[bytes, bytes]]:
        return [(b"authorization", b"Bearer " + self.texts[tenant].encode())]


FAST = ResponsesSettings(lease_s=1.0)
FAST_BATCHES = BatchSettings(poll_s=0.05, insist_after=3)


@asynccontextmanager
async def stored_world(
    store: Path,
    script: FakeResponses,
    *,
    keys: Keys | None = None,
    settings: ResponsesSettings = FAST,
    dialect: str = "openai",
    max_held_bytes: int = 64 << 20,
) -> AsyncIterator[World]:
    """A gateway whose objects lie in the SQLite file `store`."""
    given: Sequence[KeySettings] = keys.settings if keys is not None else ()
    async with World(keys=given) as world:
        threads = StoreThreads(SqliteStore(store))
        objects = TenantObjects(
            threads,
            world.gateway._parts.keys,
            settings,
            FAST_BATCHES,
            name=secrets.token_hex(8),
            max_body_bytes=1 << 20,
            max_held_bytes=max_held_bytes,
            clock=world.clock.now,
            model_of=lambda name: name or "m",
        )
        world.change(objects=objects)
        await world.add("w", script, dialect=dialect)
        objects.open(world.gateway.generate, world.gateway.run_line)
        try:
            yield world
        finally:
            await objects.close()
            threads.close()


async def call(
    world: World, method: str, path: str, body: Any = None, headers: Sequence[tuple[bytes, bytes]] = ()
) -> Got:
    data = b"" if body is None else json.dumps(body).encode()
    return await _got(
        await world.client.send(method.encode(), path.encode(), headers, data, connect_s=LONG_S, head_s=LONG_S)
    )


def events_of(body: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: ")]

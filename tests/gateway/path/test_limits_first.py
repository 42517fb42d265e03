"""A key above a limit is refused before its request costs the gateway any work."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest
from mocks import MockWorker, answers, chunk, hangs
from waiting import until
from world import KeysDouble, World

from stoker.base.errors import DeadlineExceeded
from stoker.gateway.api.client_body import RequestEnvelope
from stoker.gateway.http import HttpRequest
from stoker.gateway.key_settings import KeySettings
from stoker.gateway.prefix.conversation_keys import ConversationKeys

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SHOWN = [(b"authorization", b"Bearer secret")]
ANSWER = b'{"usage":{"prompt_tokens":10,"completion_tokens":5}}'


def key(**limits: Any) -> KeySettings:
    return KeySettings("k", hashlib.sha256(b"secret").hexdigest(), **limits)


class CountedKeys(KeysDouble):
    """Counts the conversations for which prefix keys were computed."""

    num_computed = 0

    def keys_now(self, model: str, envelope: RequestEnvelope, salt: str | None) -> ConversationKeys:
        self.num_computed += 1
        return super().keys_now(model, envelope, salt)


@pytest.mark.parametrize(
    ("limits", "says"),
    [({"requests_per_minute": 1}, "1 requests per minute"), ({"tokens_per_minute": 15}, "15 tokens per minute")],
)
@pytest.mark.parametrize("body", [CHAT, b"\xff this is never parsed"])
def test_a_key_above_its_rate_is_refused_before_its_body_is_read(limits: Any, says: str, body: Any) -> None:
    async def main() -> None:
        counted = CountedKeys()
        async with World(keys=[key(**limits)], key_makers=counted) as world:
            worker = await world.add("a", answers(ANSWER))
            assert (await world.ask(CHAT, headers=SHOWN)).status == 200
            for _ in range(3):
                got = await world.ask(body, headers=SHOWN)
                assert (got.status, got.json["error"]["code"]) == (429, "rate_limited")
                assert says in got.json["error"]["message"]
                assert int(got.headers["retry-after"]) >= 1
            assert (counted.num_computed, len(worker.bodies)) == (1, 1)

    asyncio.run(main())


def test_a_key_with_too_many_requests_is_refused_before_its_body_is_read() -> None:
    async def main() -> None:
        counted = CountedKeys()
        async with World(keys=[key(concurrency=1)], key_makers=counted) as world:
            worker = await world.add("a", hangs())
            first = asyncio.create_task(world.ask(CHAT, headers=SHOWN))
            await until(lambda: len(worker.bodies) == 1)
            got = await world.ask(b"not json", headers=SHOWN)
            assert got.status == 429
            assert "limit is 1" in got.json["error"]["message"]
            assert counted.num_computed == 1
            first.cancel()

    asyncio.run(main())


def test_an_invalid_body_counts_as_a_request() -> None:
    async def main() -> None:
        async with World(keys=[key(requests_per_minute=2, concurrency=1)]) as world:
            await world.add("a", answers(ANSWER))
            for status in (400, 400, 429):
                assert (await world.ask(b"not json", headers=SHOWN)).status == status

    asyncio.run(main())


async def begins(worker: MockWorker, request: HttpRequest) -> None:
    """Stream 200 tokens and never end."""
    request.start(200, [(b"content-type", b"text/event-stream")])
    for _ in range(200):
        request.write(chunk("word " * 60))
    await asyncio.Event().wait()


@pytest.mark.parametrize("stream", [True, False])
def test_a_running_answer_is_charged_to_its_key(stream: bool) -> None:
    async def main() -> None:
        async with World(keys=[key(tokens_per_minute=100)]) as world:
            worker = await world.add("a", begins if stream else hangs())
            running = asyncio.create_task(world.ask({**CHAT, "stream": stream}, headers=SHOWN))
            await until(lambda: len(worker.bodies) == 1)
            if stream:
                await until(
                    lambda: any(one.output_tokens and one.output_tokens() > 100 for one in world.admission.running)
                )
            else:
                world.clock.advance(30.0)
            world.admission.charge_running(world.clock.now())
            got = await world.ask(CHAT, headers=SHOWN)
            assert (got.status, got.json["error"]["code"]) == (429, "rate_limited")
            running.cancel()

    asyncio.run(main())


@pytest.mark.parametrize(("status", "is_charged"), [(504, True), (400, False)])
def test_a_deadline_of_the_client_does_not_return_its_tokens(status: int, is_charged: bool) -> None:
    """The worker has computed the prompt by then. A refused request has cost it nothing."""

    async def main() -> None:
        async with World(keys=[key(tokens_per_minute=15)]) as world:
            late = {"error": {"message": "late", "code": DeadlineExceeded.code}}
            await world.add("a", answers(late, status))
            assert (await world.ask({**CHAT, "timeout_s": 0.1}, headers=SHOWN)).status == status
            row = await world.settled()
            assert (row.prompt_tokens, row.completion_tokens) == (0, 0)
            assert (await world.ask(CHAT, headers=SHOWN)).status == (429 if is_charged else status)

    asyncio.run(main())

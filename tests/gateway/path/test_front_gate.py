"""Requests are authenticated from their heads: without a key, no body is received."""

from __future__ import annotations

import asyncio
import hashlib
import json

import pytest
from mocks import answers
from waiting import LONG_S, until
from world import World

from stoker.gateway.http import HeadRefusal, Server, ServerLimits
from stoker.gateway.key_settings import KeySettings

KEYS = [
    KeySettings(name=name, tenant=name, sha256=hashlib.sha256(name.encode()).hexdigest()) for name in ("one", "two")
]
ANSWER = b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}'
BODY = b'{"model":"m","messages":[]}'


def head(path: str, length: int, more: bytes = b"", method: bytes = b"POST") -> bytes:
    line = b"%b %b HTTP/1.1\r\nhost: a\r\n%b" % (method, path.encode(), more)
    return line + (b"transfer-encoding: chunked\r\n\r\n" if length < 0 else b"content-length: %d\r\n\r\n" % length)


async def answer_to(world: World, sent: bytes) -> tuple[int, dict[str, str], bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", world.server.port)
    try:
        writer.write(sent)
        async with asyncio.timeout(LONG_S):
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines[1:-2])
            body = await reader.readexactly(int(headers.get("content-length", 0)))
        return int(lines[0].split(" ")[1]), headers, body
    finally:
        writer.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"])
@pytest.mark.parametrize("key", [b"", b"authorization: Bearer wrong\r\n"])
@pytest.mark.parametrize("length", [60 << 20, -1, 100])
def test_a_request_without_a_valid_key_is_refused_before_its_body(path: str, key: bytes, length: int) -> None:
    async def main() -> None:
        async with World(keys=KEYS) as world:
            expects = b"expect: 100-continue\r\nx-request-id: mine\r\n"
            status, headers, body = await answer_to(world, head(path, length, key + expects))
            assert status == 401
            assert (headers["connection"], headers["www-authenticate"]) == ("close", "Bearer")
            assert headers["x-request-id"] == "mine"
            assert json.loads(body)["error"]["code"] == "invalid_api_key"
            assert world.metrics.refusals["invalid_api_key"] == 1
            assert world.server.bodies.held_bytes == 0
            assert world.rows.rows == []

    asyncio.run(main())


@pytest.mark.parametrize(
    "path", ["/health", "/nothing", "/admin/workers", "/stoker/register", "/v1/usage", "/v1/models"]
)
def test_paths_without_a_key_take_only_small_bodies(path: str) -> None:
    async def main() -> None:
        async with World(keys=KEYS) as world:
            status, _, body = await answer_to(world, head(path, (64 << 10) + 1))
            assert status == 413
            assert "at most 65536" in json.loads(body)["error"]["message"]
            assert (await answer_to(world, head(path, 5) + b"hello"))[0] != 413

    asyncio.run(main())


def test_a_tenant_that_holds_its_share_of_the_budget_does_not_block_another() -> None:
    async def main() -> None:
        world = World(keys=KEYS)
        limits = ServerLimits(max_held_bytes=2 << 20)
        world.server = Server(world.gateway.handle, limits, on_bad=world.gateway.count_bad_request, gate=world.gate)
        async with world:
            await world.add("a", answers(ANSWER))
            _, slow = await asyncio.open_connection("127.0.0.1", world.server.port)
            slow.write(head("/v1/chat/completions", 1 << 20, b"x-api-key: one\r\n") + bytes((1 << 20) - 1))
            await until(lambda: world.server.bodies.held_bytes == 1 << 20)
            body = BODY + b" " * 8000  # smaller ones are not counted
            mine = head("/v1/chat/completions", len(body), b"x-api-key: one\r\n") + body
            status, headers, _ = await answer_to(world, mine)
            assert (status, headers["retry-after"]) == (503, "1")
            assert (await answer_to(world, mine.replace(b": one", b": two")))[0] == 200
            assert (await world.settled()).tenant == "two"
            slow.close()
            await until(lambda: world.server.bodies.held_bytes == 0)

    asyncio.run(main())


def test_a_key_above_its_rate_limit_is_refused_before_a_large_body() -> None:
    async def main() -> None:
        limited = [KeySettings(name="one", tenant="one", sha256=KEYS[0].sha256, requests_per_minute=1)]
        async with World(keys=limited) as world:
            await world.add("a", answers(ANSWER))
            key = b"authorization: Bearer one\r\n"
            path = "/v1/chat/completions"
            assert (await answer_to(world, head(path, len(BODY), key) + BODY))[0] == 200
            for length in (20 << 20, -1):
                chunk = b"186a0\r\n" + b" " * 100_000 if length < 0 else b""
                status, headers, body = await answer_to(world, head(path, length, key) + chunk)
                assert (status, json.loads(body)["error"]["code"]) == (429, "rate_limited")
                assert int(headers["retry-after"]) > 0
            assert world.metrics.refusals["rate_limited"] == 2
            assert len(world.rows.rows) == 1
            # A small body is received; admission refuses it and the connection stays open.
            status, headers, _ = await answer_to(world, head(path, len(BODY), key) + BODY)
            assert (status, headers.get("connection")) == (429, None)

    asyncio.run(main())


def test_an_address_that_floods_public_paths_is_refused_and_others_are_not() -> None:
    async def main() -> None:
        async with World(keys=KEYS) as world:
            await world.add("a", answers(ANSWER))
            gate, found = world.gate, []
            parsed, _ = world.server.heads.request(b"GET /health HTTP/1.1\r\nhost: a")
            for _ in range(501):
                found.append(gate(parsed, "10.0.0.1"))
            assert not any(isinstance(one, HeadRefusal) for one in found[:-1])
            refusal = found[-1]
            assert isinstance(refusal, HeadRefusal)
            assert (refusal.status, json.loads(refusal.body)["error"]["code"]) == (429, "rate_limited")
            assert not isinstance(gate(parsed, "10.0.0.2"), HeadRefusal)
            key = b"authorization: Bearer one\r\n"
            assert (await answer_to(world, head("/v1/chat/completions", len(BODY), key) + BODY))[0] == 200
            world.clock.advance(1.0)
            assert not isinstance(gate(parsed, "10.0.0.1"), HeadRefusal)

    asyncio.run(main())

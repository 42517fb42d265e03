"""Web pages of allowed origins may call the gateway from a browser, and no others."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
from mocks import answers
from waiting import LONG_S
from world import Got, World

from stoker.base.errors import ConfigError
from stoker.gateway.key_settings import KeySettings
from stoker.gateway.listen_settings import ListenSettings
from stoker.gateway.path.front_gate import FrontGate
from stoker.proto.cors import CorsRules

PATH = b"/v1/chat/completions"
PAGE = b"https://page.example"
# vLLM allows all origins by default.
WORKER = answers({"id": "c", "choices": []}, headers=[(b"access-control-allow-origin", b"*")])


async def send(world: World, method: bytes, origin: bytes, *headers: tuple[bytes, bytes], body: bytes = b"") -> Got:
    sent = [(b"origin", origin), *headers]
    answer = await world.client.send(method, PATH, sent, body, connect_s=LONG_S, head_s=LONG_S)
    found = {name.decode(): value.decode() for name, value in answer.headers}
    return Got(answer.status, found, await answer.read(1 << 20))


def allow(world: World, *origins: str) -> None:
    rules = CorsRules(origins)
    world.change(cors=rules)
    assert isinstance(world.gate, FrontGate)
    world.gate._cors = rules


@pytest.mark.parametrize("origins", [(PAGE.decode(),), ("*",)])
def test_an_allowed_page(origins: tuple[str, ...]) -> None:
    async def main() -> None:
        key = KeySettings("k", hashlib.sha256(b"secret").hexdigest(), tenant="t")
        async with World(keys=[key]) as world:
            allow(world, *origins)
            await world.add("w", WORKER, dialect="vllm")
            expected = "*" if origins == ("*",) else PAGE.decode()
            asked = ((b"access-control-request-method", b"POST"), (b"access-control-request-headers", b"authorization"))
            preflight = await send(world, b"OPTIONS", PAGE, *asked)
            assert preflight.status == 204, "a preflight has no key"
            assert preflight.headers["access-control-allow-origin"] == expected
            assert preflight.headers["access-control-allow-headers"] == "authorization"
            assert "POST" in preflight.headers["access-control-allow-methods"]
            known = (b"authorization", b"Bearer secret")
            body = b'{"model":"m","messages":[]}'
            for got, status in (
                (await send(world, b"POST", PAGE, known, body=body), 200),
                (await send(world, b"POST", PAGE, known, body=b"{"), 400),
                (await send(world, b"POST", PAGE, body=body), 401),
            ):
                assert got.status == status
                assert got.headers["access-control-allow-origin"] == expected

    asyncio.run(main())


def test_other_pages_get_no_permission() -> None:
    async def main() -> None:
        async with World() as world:
            await world.add("w", WORKER, dialect="vllm")
            body = b'{"model":"m","messages":[]}'
            for origins in ((), ("https://other.example",)):
                allow(world, *origins)
                got = await send(world, b"POST", PAGE, body=body)
                assert got.status == 200
                assert not any(name.startswith("access-control") for name in got.headers), (
                    "nor does the worker give one"
                )
                asked = (b"access-control-request-method", b"POST")
                preflight = await send(world, b"OPTIONS", PAGE, asked)
                assert not any(name.startswith("access-control") for name in preflight.headers)

    asyncio.run(main())


def test_an_origin_that_is_none_is_refused_at_the_start() -> None:
    for wrong in ("example.com", "https://a/path", "https://a\r\nx: y", ""):
        with pytest.raises(ConfigError, match="--cors-origin"):
            ListenSettings(cors_origin=(wrong,))

"""/tokenize and /detokenize are forwarded to a worker of the model; /v1/models shows the context length."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
from mocks import answers, drops, hangs
from waiting import until
from world import World

from stoker.gateway.key_settings import KeySettings

TOKENS = b'{"count":2,"max_model_len":64,"tokens":[1,2]}'


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_the_request_is_forwarded_to_a_worker_of_the_model(path: str) -> None:
    async def main() -> None:
        async with World() as world:
            worker = await world.add("a", answers(TOKENS, headers=[(b"x-stoker-inside", b"1")]))
            got = await world.ask(b'{"model": "m",  "prompt": "hi"}', path)
            assert (got.status, got.body) == (200, TOKENS)
            assert "x-stoker-inside" not in got.headers
            assert (worker.paths, worker.bodies) == ([path], [b'{"model": "m",  "prompt": "hi"}'])
            assert world.rows.rows == []

    asyncio.run(main())


def test_the_model_may_be_omitted_and_a_workers_error_is_passed_on() -> None:
    async def main() -> None:
        async with World() as world:
            error = {"error": {"message": "Give either 'prompt' or 'messages'.", "param": "prompt"}}
            await world.add("a", answers(error, 400))
            got = await world.ask(b"{}", "/tokenize")
            assert (got.status, got.json) == (400, error)

    asyncio.run(main())


def test_a_worker_that_drops_the_request_is_replaced() -> None:
    async def main() -> None:
        async with World() as world:
            await world.add("a", drops())
            await world.add("b", answers(TOKENS))
            for _ in range(2):
                assert (await world.ask({"model": "m"}, "/tokenize")).body == TOKENS

    asyncio.run(main())


def test_without_a_worker_or_a_model_there_is_a_clean_error() -> None:
    async def main() -> None:
        async with World() as world:
            await world.add("a", drops())
            lost = await world.ask({"model": "m"}, "/tokenize")
            assert (lost.status, lost.json["error"]["code"]) == (502, "worker_failed")
            unknown = await world.ask({"model": "x"}, "/tokenize")
            assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")
            assert (await world.ask(b"[]", "/tokenize")).status == 400
            assert (await world.get("/tokenize")).status == 405

    asyncio.run(main())


def test_a_body_that_loses_two_workers_goes_to_no_third() -> None:
    async def main() -> None:
        async with World() as world:
            for name in "abcd":
                await world.add(name, drops())
            got = await world.ask({"model": "m"}, "/tokenize")
            assert (got.status, got.json["error"]["code"]) == (502, "worker_failed")
            assert sum(len(worker.bodies) for worker in world.workers.values()) == 2

    asyncio.run(main())


def test_a_key_is_needed_where_keys_are_configured() -> None:
    async def main() -> None:
        key = KeySettings("k", hashlib.sha256(b"secret").hexdigest())
        async with World(keys=[key]) as world:
            worker = await world.add("a", answers(TOKENS))
            assert (await world.ask({"model": "m"}, "/tokenize")).status == 401
            assert worker.bodies == []
            headers = [(b"authorization", b"Bearer secret")]
            assert (await world.ask({"model": "m"}, "/tokenize", headers)).status == 200
            assert "authorization" not in worker.headers[0]

    asyncio.run(main())


def test_a_known_context_length_is_listed() -> None:
    async def main() -> None:
        async with World() as world:
            await world.add("a", answers(TOKENS))
            assert "max_model_len" not in (await world.get("/v1/models/m")).json
            world.max_model_tokens["m"] = 4096
            assert (await world.get("/v1/models/m")).json["max_model_len"] == 4096
            assert (await world.get("/v1/models")).json["data"][0]["max_model_len"] == 4096

    asyncio.run(main())


def test_it_counts_in_the_limits_of_its_key() -> None:
    async def main() -> None:
        key = KeySettings("k", hashlib.sha256(b"secret").hexdigest(), requests_per_minute=2)
        headers = [(b"authorization", b"Bearer secret")]
        async with World(keys=[key]) as world:
            worker = await world.add("a", answers(TOKENS))
            statuses = [(await world.ask({"model": "m"}, "/tokenize", headers)).status for _ in range(3)]
            assert statuses == [200, 200, 429]
            assert (await world.ask(b"not json", "/detokenize", headers)).status == 429
            assert len(worker.bodies) == 2

    asyncio.run(main())


def test_bodies_and_requests_at_a_time_are_bounded() -> None:
    async def main() -> None:
        async with World() as world:
            worker = await world.add("a", hangs())
            large = await world.ask(b"[" + b" " * (8 << 20), "/tokenize")
            assert (large.status, worker.bodies) == (400, [])
            assert "8388608 bytes" in large.json["error"]["message"]
            waiting = [asyncio.create_task(world.ask({"model": "m"}, "/tokenize")) for _ in range(8)]
            await until(lambda: len(worker.bodies) == 8)
            assert (await world.ask({"model": "m"}, "/tokenize")).status == 429
            for one in waiting:
                one.cancel()

    asyncio.run(main())

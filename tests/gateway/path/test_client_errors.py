"""No error that a client sees names a worker, its address or a file."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from fake_stoker import FakeStoker
from mocks import answers, drops
from waiting import until
from world import PATIENT, Got, World

from stoker.fleet.spec import Role

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**CHAT, "stream": True}
NAME = "worker-7"


def reveals_nothing(world: World, got: Got) -> bool:
    port = world.workers[NAME].port
    return not any(word in got.body for word in (NAME.encode(), b"127.0.0.1", str(port).encode(), b"/"))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("stopped", [True, False])
def test_a_lost_worker_is_not_named(path: str, stopped: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with World(proxy=replace(PATIENT, retries=0)) as world:
            worker = await world.add(NAME, drops())
            if stopped:
                await worker.stop()
            got = await world.ask(CHAT, path, [(b"x-request-id", b"mine-1")])
            assert (got.status, got.json["error"]["code"]) == (502, "worker_failed")
            assert reveals_nothing(world, got), got.body

    asyncio.run(main())
    assert any(NAME in str(vars(record)) for record in caplog.records)


def test_a_broken_stream_does_not_name_its_worker() -> None:
    async def main() -> None:
        async with World(resume_grace_s=0.0) as world:
            worker = await world.add(NAME, FakeStoker(dies=[4]), dialect="stoker")
            asking = asyncio.create_task(world.ask(STREAM))
            await until(lambda: len(worker.bodies) == 1 and worker.num_running == 0)
            await worker.stop()
            world.clock.advance(10.0)
            got = await asking
            last = Got(got.status, got.headers, got.body.rstrip().split(b"\n\n")[-1])
            assert b"worker_lost" in last.body
            assert reveals_nothing(world, last), last.body

    asyncio.run(main())


def test_a_decode_worker_without_a_prefill_worker_is_not_named() -> None:
    async def main() -> None:
        async with World() as world:
            await world.add(NAME, answers(b"{}"), dialect="sglang", role=Role.DECODE)
            got = await world.ask(CHAT)
            assert (got.status, got.json["error"]["code"]) == (503, "no_worker")
            assert reveals_nothing(world, got), got.body

    asyncio.run(main())

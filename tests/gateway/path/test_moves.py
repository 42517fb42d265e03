"""Requests that move away from a draining worker: the client gets the bytes of an undisturbed run, and nothing fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_stoker import FakeStoker
from mocks import answers
from test_proxy_resume import BODY, ID, USAGE, undisturbed
from waiting import until
from world import World

from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Member
from stoker.fleet.spec import Role

WHOLE = BODY | {"stream": False}


async def running(world: World, fake: FakeStoker, body: dict[str, Any]) -> tuple[asyncio.Task[Any], Member]:
    """Send a request to worker a, which holds it after its first token."""
    asked = asyncio.create_task(world.ask(body, headers=ID))
    await until(lambda: world.moves.num_running(WorkerId("a")) == 1 and world.workers["a"].num_running > 0)
    member = world.fleet.member(WorkerId("a"))
    assert member is not None
    return asked, member


def drain_and_move(world: World, member: Member) -> None:
    world.fleet.drain(member.worker_id, world.clock.now())
    world.moves.begin(member)


@pytest.mark.parametrize("body", [BODY, BODY | USAGE, BODY | {"n": 3}, WHOLE], ids=["plain", "usage", "three", "whole"])
def test_a_moved_request_is_the_answer_of_one_worker(body: dict[str, Any]) -> None:
    async def main() -> None:
        async with World() as undisturbed_world:
            await undisturbed_world.add("a", FakeStoker(), dialect="stoker")
            expected = (await undisturbed_world.ask(body, headers=ID)).body
        async with World() as world:
            fake = FakeStoker(holds=asyncio.Event())
            await world.add("a", fake, dialect="stoker")
            asked, member = await running(world, fake, body)
            b = await world.add("b", FakeStoker(created=2000, cached_tokens=9), dialect="stoker")
            drain_and_move(world, member)
            got = await asked
            assert got.status == 200
            assert got.body == expected if body["stream"] else got.json == json.loads(expected)
            row = await world.settled()
            assert (row.error, row.resumed, row.cached_tokens) == (None, 0, 3)
            assert world.metrics.moves == {"with_kv": 1}
            assert not world.metrics.resumes
            (sent,) = b.jsons
            assert sent["kv_transfer_params"]["choices"][0]["remote_request_id"] == "l-0"
            assert len(sent["resume"]["choices"][0]["token_ids"]) == 1
            assert world.moves.num_running(WorkerId("a")) == world.moves.num_running(WorkerId("b")) == 0

    asyncio.run(main())


def test_a_request_can_move_again() -> None:
    async def main() -> None:
        expected = await undisturbed(BODY)
        async with World() as world:
            fakes = {name: FakeStoker(holds=asyncio.Event()) for name in "abc"}
            await world.add("a", fakes["a"], dialect="stoker")
            asked, member = await running(world, fakes["a"], BODY)
            for old, new in ("ab", "bc", "cd"):
                await world.add(new, FakeStoker() if new == "d" else fakes[new], dialect="stoker")
                member = world.fleet.member(WorkerId(old))
                assert member is not None
                drain_and_move(world, member)
                await until(lambda new=new: bool(world.workers[new].bodies))
            assert (await asked).body == expected
            assert world.metrics.moves == {"with_kv": 3}
            assert (await world.settled()).error is None

    asyncio.run(main())


def test_without_another_worker_the_request_finishes_where_it_is() -> None:
    async def main() -> None:
        async with World() as world:
            fake = FakeStoker(holds=asyncio.Event())
            await world.add("a", fake, dialect="stoker")
            # None of these can continue it: another kind of server, a prefill worker, and one that is drained.
            await world.add("foreign", answers({}), dialect="openai")
            await world.add("prefill", FakeStoker(), dialect="stoker", role=Role.PREFILL)
            await world.add("drained", FakeStoker(), dialect="stoker")
            for name in ("foreign", "prefill", "drained"):
                world.fleet.drain(WorkerId(name), world.clock.now())
            asked, member = await running(world, fake, BODY)
            world.fleet.drain(WorkerId("foreign"), world.clock.now(), False)
            world.fleet.drain(WorkerId("prefill"), world.clock.now(), False)
            drain_and_move(world, member)
            assert world.moves.stuck_models(WorkerId("a")) == {"m"}
            assert fake.holds is not None
            fake.holds.set()
            assert (await asked).body.endswith(b"[DONE]\n\n")
            assert not fake.moved

    asyncio.run(main())


def test_an_old_worker_that_cannot_hand_off_finishes_its_requests() -> None:
    async def main() -> None:
        async with World() as world:
            fake = FakeStoker(holds=asyncio.Event(), refuses_moves=True)
            a = await world.add("a", fake, dialect="stoker")
            asked, member = await running(world, fake, BODY)
            await world.add("b", FakeStoker(), dialect="stoker")
            drain_and_move(world, member)
            await until(lambda: a.paths.count("/stoker/move") >= 2)
            assert fake.holds is not None
            fake.holds.set()
            assert (await asked).body == await undisturbed(BODY)
            assert not world.metrics.moves

    asyncio.run(main())


@pytest.mark.parametrize("body", [BODY, WHOLE], ids=["stream", "whole"])
def test_the_source_may_die_in_mid_move(body: dict[str, Any]) -> None:
    async def main() -> None:
        expected = await undisturbed(body) if body["stream"] else b""
        async with World() as world:
            fake = FakeStoker(holds=asyncio.Event(), refuses_moves=True)
            a = await world.add("a", fake, dialect="stoker")
            asked, member = await running(world, fake, body)
            await world.add("b", FakeStoker(), dialect="stoker")
            drain_and_move(world, member)
            await until(lambda: "/stoker/move" in a.paths)
            await a.stop()
            got = await asked
            assert got.status == 200
            assert not expected or got.body == expected

    asyncio.run(main())


@pytest.mark.parametrize("body", [BODY, WHOLE], ids=["stream", "whole"])
def test_the_target_may_die_after_the_move(body: dict[str, Any]) -> None:
    async def main() -> None:
        expected = await undisturbed(body) if body["stream"] else b""
        async with World() as world:
            fake = FakeStoker(holds=asyncio.Event())
            await world.add("a", fake, dialect="stoker")
            asked, member = await running(world, fake, body)
            await world.add("b", FakeStoker(dies=[0]), dialect="stoker")
            drain_and_move(world, member)
            await until(lambda: bool(world.workers["b"].bodies))
            c = await world.add("c", FakeStoker(), dialect="stoker")
            got = await asked
            assert got.status == 200
            assert not expected or got.body == expected
            assert len(c.bodies) == 1
            assert (await world.settled()).error is None

    asyncio.run(main())


def test_a_handoff_that_nobody_asked_for_is_a_failure() -> None:
    """A worker must not send a request around the fleet."""

    async def main() -> None:
        async with World() as world:

            class Everything(set[str]):
                def __contains__(self, name: object) -> bool:
                    return True

            await world.add("a", FakeStoker(moved=Everything()), dialect="stoker")
            b = await world.add("b", FakeStoker(), dialect="stoker")
            got = await world.ask(BODY, headers=ID)
            assert got.body == await undisturbed(BODY)
            assert len(b.bodies) == 1
            assert not world.metrics.moves
            assert world.metrics.upstream[WorkerId("a"), "invalid"] == 1

    asyncio.run(main())


def test_a_request_that_brings_its_kv_needs_no_prefill_worker() -> None:
    async def main() -> None:
        async with World(policy="cost", prompt_tokens=5000) as world:
            fake = FakeStoker(holds=asyncio.Event())
            await world.add("a", fake, dialect="stoker", role=Role.DECODE)
            asked, member = await running(world, fake, BODY)
            prefill = await world.add("p", FakeStoker(), dialect="stoker", role=Role.PREFILL)
            b = await world.add("b", FakeStoker(), dialect="stoker", role=Role.DECODE)
            drain_and_move(world, member)
            assert (await asked).body == await undisturbed(BODY)
            assert not prefill.bodies
            assert len(b.bodies) == 1

    asyncio.run(main())


def test_a_prompt_that_waits_at_a_draining_prefill_worker_goes_to_another() -> None:
    async def main() -> None:
        expected = await undisturbed(BODY)
        async with World(policy="cost", prompt_tokens=5000) as world:
            released = asyncio.Event()

            async def waits(worker: Any, request: Any) -> None:
                if request.path == b"/stoker/move":
                    released.set()
                    request.respond(202, [], b"{}")
                    return
                request.start(200, [(b"content-type", b"text/event-stream")])
                await released.wait()
                request.write(b':k {"transfer_mode":"stoker","choices":[null]}\n\n')
                request.finish()

            await world.add("p1", waits, dialect="stoker", role=Role.PREFILL)
            d = await world.add("d", FakeStoker(), dialect="stoker", role=Role.DECODE)
            asked = asyncio.create_task(world.ask(BODY, headers=ID))
            await until(lambda: world.moves.num_running(WorkerId("p1")) == 1)
            p2 = await world.add("p2", FakeStoker(), dialect="stoker", role=Role.PREFILL)
            member = world.fleet.member(WorkerId("p1"))
            assert member is not None
            drain_and_move(world, member)
            assert (await asked).body == expected
            assert len(p2.bodies) == len(d.bodies) == 1
            assert world.metrics.moves == {"without_kv": 1}

    asyncio.run(main())

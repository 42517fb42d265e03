"""Whose fault a failure is: clients cannot take workers out of service, and a request of death stops at two workers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from mocks import DONE, JSON, MockWorker, Script, answers, chunk, drops, hangs, streams, usage
from waiting import LONG_S, until
from world import PATIENT, World

from stoker.base.ids import WorkerId
from stoker.fleet.health import Breaker
from stoker.gateway.http import HttpRequest
from stoker.gateway.key_settings import KeySettings

CHAT = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
OTHER = b'{"model": "m", "messages": [{"role": "user", "content": "other"}]}'
HURRY = b'{"model": "m", "timeout_s": 1e-6, "messages": []}'
ANSWER = json.dumps({"id": "c", "choices": [], "usage": usage(10, 4, 2)}).encode()
LATE = {"error": {"message": "late", "type": "timeout_error", "param": None, "code": "deadline_exceeded"}}


def obeys_deadlines(worker: MockWorker, request: HttpRequest) -> Any:
    script = answers(LATE, 504) if "timeout_s" in json.loads(request.body) else answers(ANSWER)
    return script(worker, request)


def crashes_on(body: bytes) -> Script:
    """Drop the connection if the request is `body`, else answer."""

    async def script(worker: MockWorker, request: HttpRequest) -> None:
        await (drops() if request.body.endswith(body[1:]) else answers(ANSWER))(worker, request)

    return script


def breakers(world: World) -> set[Breaker]:
    return {member.health.breaker(world.clock.now()) for member in world.fleet.members()}


def num_sent(world: World) -> int:
    return sum(len(worker.bodies) for worker in world.workers.values())


def test_one_tenants_deadlines_cost_another_tenant_nothing() -> None:
    async def main() -> None:
        named = [
            KeySettings(name=name, sha256=sha256(name.encode()).hexdigest(), tenant=name)
            for name in ("mallory", "alice")
        ]
        headers = {name: [(b"authorization", b"Bearer " + name.encode())] for name in ("mallory", "alice")}
        async with World(keys=named) as world:
            for name in "abc":
                await world.add(name, obeys_deadlines, dialect="stoker")
            for number in range(11):
                got = await world.ask(HURRY, headers=headers["mallory"])
                assert (got.status, got.json["error"]["code"]) == (504, "deadline_exceeded")
                assert num_sent(world) == 1 + 9 * number, "never retried"
                for _ in range(8):
                    assert (await world.ask(CHAT, headers=headers["alice"])).status == 200
            assert breakers(world) == {Breaker.CLOSED}
            assert world.metrics.upstream == {}

    asyncio.run(main())


def test_a_worker_cannot_name_a_deadline_that_the_client_did_not_set() -> None:
    async def main() -> None:
        async with World() as world:
            await world.add("late", answers(LATE, 504))
            await world.add("good", answers(ANSWER))
            for _ in range(8):
                assert (await world.ask(CHAT)).status == 200
            member = world.fleet.member(WorkerId("late"))
            assert member is not None
            assert member.health.breaker(world.clock.now()) is Breaker.OPEN

    asyncio.run(main())


def test_a_foreign_504_after_the_clients_deadline_is_the_clients() -> None:
    async def main() -> None:
        async with World() as world:

            async def slow(worker: MockWorker, request: HttpRequest) -> None:
                world.clock.advance(2.0)
                await answers({"detail": "gateway timeout"}, 504)(worker, request)

            for name in "ab":
                await world.add(name, slow)
            assert (await world.ask(b'{"model": "m", "timeout_s": 1.5}')).status == 504
            assert num_sent(world) == 1
            assert world.metrics.upstream == {}
            assert (await world.ask(b'{"model": "m", "timeout_s": 2.5}')).status == 504
            assert num_sent(world) == 3, "it failed before the deadline, so the request goes to another worker"

    asyncio.run(main())


@pytest.mark.parametrize("status", [500, 502, 504])
def test_an_error_that_recurs_on_a_second_worker_is_the_requests_own(status: int) -> None:
    async def main() -> None:
        async with World() as world:
            said = {"error": {"message": "no", "type": "x", "param": None, "code": "y"}}
            for name in "abc":
                await world.add(name, answers(said, status))
            for number in range(1, 9):
                got = await world.ask(CHAT)
                assert (got.status, got.json) == (status, said)
                assert num_sent(world) == 2 * number
            assert breakers(world) == {Breaker.CLOSED}

    asyncio.run(main())


@pytest.mark.parametrize("status", [401, 407])
def test_a_worker_that_refuses_the_gateways_key_attracts_no_requests(status: int) -> None:
    async def main() -> None:
        async with World() as world:
            said = {"error": {"message": "bad key of 10.0.0.7", "type": "x", "param": None, "code": "invalid_api_key"}}
            bad = await world.add("bad", answers(said, status))
            await world.add("good", answers(ANSWER))
            for _ in range(10):
                assert (await world.ask(CHAT)).status == 200
            assert len(bad.bodies) == 3
            world.fleet.remove(WorkerId("good"), world.clock.now())
            world.clock.advance(600)
            got = await world.ask(CHAT)
            assert got.status in (502, 503)  # a client would take 401 for an error in its own key
            assert b"10.0.0.7" not in got.body

    asyncio.run(main())


def test_an_error_that_a_second_worker_does_not_have_is_the_first_workers() -> None:
    async def main() -> None:
        async with World() as world:
            bad = await world.add("bad", answers({"error": {}}, 500))
            await world.add("good", answers(ANSWER))
            for _ in range(10):
                assert (await world.ask(CHAT)).status == 200
            assert len(bad.bodies) == 3

    asyncio.run(main())


def test_an_answer_that_is_too_long_for_the_timeout_does_not_count_while_others_complete() -> None:
    async def main() -> None:
        async with World(proxy=replace(PATIENT, first_byte_s=0.05)) as world:

            async def script(worker: MockWorker, request: HttpRequest) -> None:
                await (hangs() if request.body == OTHER else answers(ANSWER))(worker, request)

            a = await world.add("a", script)
            await world.add("b", script)
            for number in range(1, 7):
                asking = asyncio.create_task(world.ask(OTHER))
                await until(lambda seen=number: num_sent(world) == 3 * seen - 2)
                world.clock.advance(0.01)
                for _ in range(2):
                    assert (await world.ask(CHAT)).status == 200
                got = await asking
                assert (got.status, got.json["error"]["code"]) == (504, "answer_late")
            assert breakers(world) == {Breaker.CLOSED}
            assert a.bodies

    asyncio.run(main())


def test_a_request_of_death_is_stopped_and_then_refused() -> None:
    async def main() -> None:
        async with World() as world:
            for name in "abcdef":
                await world.add(name, crashes_on(OTHER))
            for num_crashes, status, code in [
                (2, 502, "worker_failed"),
                (3, 502, "worker_failed"),
                (3, 400, "request_crashes_workers"),
                (3, 400, "request_crashes_workers"),
            ]:
                got = await world.ask(OTHER)
                assert (got.status, got.json["error"]["code"]) == (status, code)
                assert b"127.0.0.1" not in got.body
                assert sum(world.metrics.upstream.values()) == num_crashes
                world.clock.advance(10.0)
                assert (await world.ask(CHAT)).status == 200
            world.clock.advance(600.0)
            assert (await world.ask(OTHER)).status == 502, "the body is forgotten after a while"

    asyncio.run(main())


def test_a_worker_that_crashes_on_a_reused_connection_counts_as_lost() -> None:
    """The connection closes without a byte, as a stale one does, and then the worker refuses connections."""

    async def main() -> None:
        async with World() as world:

            async def dies(worker: MockWorker, request: HttpRequest) -> None:
                if request.body != OTHER:
                    await answers(ANSWER)(worker, request)
                    return
                stopping.add(asyncio.ensure_future(worker.stop()))
                request.abort()

            stopping: set[asyncio.Future[None]] = set()
            for name in "abcd":
                await world.add(name, dies)
            for _ in range(4):
                assert (await world.ask(CHAT)).status == 200
            assert (await world.ask(OTHER)).status == 502
            assert sorted(kind for _, kind in world.metrics.upstream) == ["lost", "lost"]
            await asyncio.gather(*stopping)

    asyncio.run(main())


def test_other_tenants_and_other_bodies_are_not_suspects() -> None:
    async def main() -> None:
        named = [KeySettings(name=name, sha256=sha256(name.encode()).hexdigest(), tenant=name) for name in "xy"]
        async with World(keys=named) as world:
            worker = await world.add("a", drops())
            await world.add("b", drops())
            for _ in range(3):
                await world.ask(OTHER, headers=[(b"authorization", b"Bearer x")])
                world.clock.advance(60.0)
            for body, key, status in [
                (OTHER, b"x", 400),
                (OTHER, b"y", 200),
                (OTHER.replace(b"other", b"again"), b"x", 200),
            ]:
                worker.script = answers(ANSWER)
                world.workers["b"].script = answers(ANSWER)
                assert (await world.ask(body, headers=[(b"authorization", b"Bearer " + key)])).status == status

    asyncio.run(main())


def test_innocent_requests_on_both_dead_workers_succeed_when_they_are_sent_again() -> None:
    """Two workers die with 20 requests on board: one of them is the cause, and the gateway cannot know which."""

    async def main() -> None:
        bodies = [b'{"model": "m", "messages": [], "user": "%02d"}' % number for number in range(20)]
        poison = bodies[7]
        async with World(proxy=replace(PATIENT, retries=9, connect_s=LONG_S)) as world:
            num_deaths = 0
            deadly = asyncio.Event()

            async def script(worker: MockWorker, request: HttpRequest) -> None:
                """All requests on a worker are lost with it."""
                nonlocal num_deaths
                dead = deaths[worker.name]
                if request.body == poison:
                    await deadly.wait()
                    num_deaths += 1
                    dead.set()
                    deaths[worker.name] = asyncio.Event()
                elif not innocent.is_set():
                    await asyncio.wait([asyncio.ensure_future(dead.wait()), asyncio.ensure_future(innocent.wait())])
                if dead.is_set():
                    request.start(200, JSON)
                    await asyncio.sleep(0.01)
                    request.abort()
                else:
                    await answers(ANSWER)(worker, request)

            innocent = asyncio.Event()
            deaths = {name: asyncio.Event() for name in "ab"}
            for name in "ab":
                await world.add(name, script)
            asking = [asyncio.create_task(world.ask(body)) for body in bodies]
            await until(lambda: sum(worker.num_running for worker in world.workers.values()) == len(bodies))
            deadly.set()  # the poison now kills its worker, and then the one that it is retried on
            await until(lambda: num_deaths == 2)
            innocent.set()
            await asyncio.gather(*asking)
            for body in bodies:  # the clients send the same bodies again
                world.clock.advance(20.0)
                got = await world.ask(body)
                assert got.status == (502 if body == poison else 200), got.body
            world.clock.advance(20.0)
            assert (await world.ask(poison)).status == 400
            assert num_deaths == 3

    asyncio.run(main())


SMALL = replace(PATIENT, max_event_mib=0.1, max_notes_mib=0.1, max_answer_mib=0.1)
STREAM = b'{"model": "m", "stream": true, "messages": []}'
LARGE = chunk("x" * (1 << 18))
NOTES = b":u 10 3 1000 1\n" + b":t 0 5\n" * (1 << 14)


@pytest.mark.parametrize(
    ("body", "script", "num_workers"),
    [
        (STREAM, streams(LARGE, DONE), 2),
        (STREAM, streams(b":u 10 3 1000 1\n:t 0 5\n" + chunk("a"), NOTES + chunk("b"), DONE), 2),
        (CHAT, answers(b'{"id": "%b"}' % (b"x" * (1 << 18))), 1),
    ],
    ids=["event", "notes", "answer"],
)
def test_a_large_answer_that_the_client_asked_for_is_no_workers_fault(
    body: bytes, script: Script, num_workers: int
) -> None:
    async def main() -> None:
        async with World(proxy=SMALL) as world:
            for name in "abc":
                await world.add(name, script, dialect="stoker")
            for _ in range(12):
                got = await world.ask(body)
                assert b'"code":"answer_too_large"' in got.body or b'"code":"worker_failed"' in got.body
            assert num_sent(world) <= 12 * num_workers
            assert breakers(world) == {Breaker.CLOSED}

    asyncio.run(main())


def test_a_worker_that_alone_sends_large_events_is_taken_out_of_service() -> None:
    async def main() -> None:
        async with World(proxy=SMALL) as world:
            await world.add("bad", streams(LARGE, DONE))
            for name in "bc":
                await world.add(name, streams(chunk("a"), DONE))
            for _ in range(12):
                assert b"[DONE]" in (await world.ask(STREAM)).body
            assert len(world.workers["bad"].bodies) == 3  # `failures_to_open`

    asyncio.run(main())

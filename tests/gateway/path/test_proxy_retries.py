"""Failing workers: retries before the first byte, clean errors after it, and the circuit breaker."""

from __future__ import annotations

import asyncio
import errno
import json
from dataclasses import replace
from typing import Any

import pytest
from mocks import DONE, MockWorker, answers, chunk, drops, hangs, in_turn, streams, usage, usage_chunk
from waiting import LONG_S, turns, until
from world import PATIENT, World

from stoker.base.ids import WorkerId
from stoker.gateway.http import HttpRequest

CHAT = b'{"model": "m",  "messages": [{"role": "user", "content": "hi"}]}'
STREAM = b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "hi"}]}'
ANSWER = json.dumps({"id": "c", "choices": [], "usage": usage(10, 4, 2)}).encode()


@pytest.mark.parametrize(
    "failing",
    [drops(), answers({"error": {}}, 503), answers({"error": {}}, 502), answers({"error": {}}, 429), streams(cut=True)],
)
@pytest.mark.parametrize("body", [CHAT, STREAM])
def test_a_failure_before_the_first_byte_is_retried(failing: Any, body: bytes) -> None:
    async def main() -> None:
        good = streams(chunk("a"), DONE) if body == STREAM else answers(ANSWER)
        async with World() as world:
            bad = await world.add("bad", failing)
            await world.add("good", good)
            for _ in range(2):  # whichever worker is chosen first
                got = await world.ask(body)
                assert got.status == 200
                assert got.body in (ANSWER, chunk("a") + DONE)
            assert len(bad.bodies) == 1
            assert sum(world.metrics.retries.values()) == 1
            assert len(world.rows.rows) == 2

    asyncio.run(main())


def test_a_worker_that_is_not_there_costs_a_client_nothing() -> None:
    async def main() -> None:
        async with World() as world:
            gone = await world.add("gone", answers(ANSWER))
            await gone.stop()
            await world.add("there", answers(ANSWER))
            for _ in range(4):
                assert (await world.ask(CHAT)).status == 200

    asyncio.run(main())


@pytest.mark.parametrize("body", [CHAT, STREAM])
def test_a_lone_worker_that_is_restarted_is_waited_for(body: bytes) -> None:
    async def main() -> None:
        async with World(resume_grace_s=5.0) as world:
            worker = await world.add("a", in_turn(drops(), streams(chunk("a"), DONE)))
            asking = asyncio.create_task(world.ask(body))
            await until(lambda: len(worker.bodies) == 1)
            await worker.stop()
            await until(lambda: world.metrics.upstream["a", "connect"] > 0)
            await worker.start()
            world.clock.advance(2.0)  # it may be retried
            assert (await asking).status == 200
            await world.settled()

    asyncio.run(main())


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_model_whose_last_worker_left_the_fleet_is_waited_for(comes_back: bool) -> None:
    """The request had found a worker, so it must not fail with "model not found", which clients do not retry."""

    async def main() -> None:
        async with World(resume_grace_s=5.0) as world:

            async def leaves(worker: MockWorker, request: HttpRequest) -> None:
                world.fleet.remove(WorkerId("a"), world.clock.now())
                request.respond(503, [], b"{}")

            await world.add("a", in_turn(leaves, answers(ANSWER)))
            asking = asyncio.create_task(world.ask(CHAT))
            await until(lambda: not world.fleet.members())
            await turns(100)
            assert not asking.done()
            if comes_back:
                world.register("a")
                assert (await asking).status == 200
            else:
                world.clock.advance(5.1)
                got = await asking
                assert (got.status, got.json["error"]["code"]) == (503, "no_worker")
            await world.settled()

    asyncio.run(main())


def test_a_truncated_answer_is_retried() -> None:
    async def cut(worker: MockWorker, request: HttpRequest) -> None:
        request.start(200, [(b"content-type", b"application/json")])
        request.write(ANSWER[:10])
        await asyncio.sleep(0.01)
        request.abort()

    async def main() -> None:
        async with World() as world:
            await world.add("a", cut)
            await world.add("b", answers(ANSWER))
            assert (await world.ask(CHAT)).body == ANSWER
            assert (await world.settled()).status == 200

    asyncio.run(main())


@pytest.mark.parametrize("status", [400, 404, 408, 422, 501])
def test_client_errors_are_not_retried(status: int) -> None:
    async def main() -> None:
        async with World() as world:
            said = {"error": {"message": "no", "type": "x", "param": None, "code": "y"}}
            for name in "ab":
                await world.add(name, answers(said, status))
            got = await world.ask(CHAT)
            assert (got.status, got.json) == (status, said)
            assert sum(len(worker.bodies) for worker in world.workers.values()) == 1
            assert (await world.settled()).status == status

    asyncio.run(main())


def test_a_worker_that_was_given_another_model_does_not_answer_for_the_others() -> None:
    async def main() -> None:
        async with World() as world:
            said = {"error": {"message": "no", "type": "x", "param": "model", "code": "model_not_found"}}
            await world.add("a", answers(said, 404))
            await world.add("b", answers(ANSWER))
            for _ in range(4):
                assert (await world.ask(CHAT)).body == ANSWER
            assert len(world.workers["a"].bodies) > 0

    asyncio.run(main())


def test_when_all_workers_are_busy_the_client_gets_the_last_answer() -> None:
    async def main() -> None:
        async with World() as world:
            for name in "ab":
                await world.add(name, answers({"error": {"message": "full"}}, 503, [(b"retry-after", b"7")]))
            got = await world.ask(CHAT)
            assert (got.status, got.headers["retry-after"]) == (503, "7")
            assert got.json == {"error": {"message": "full"}}
            assert "x-request-id" in got.headers
            await world.settled()

    asyncio.run(main())


def test_without_a_worker_left_the_client_gets_one_clean_error() -> None:
    async def main() -> None:
        async with World() as world:
            for name in "ab":
                await world.add(name, drops())
            got = await world.ask(CHAT)
            assert got.status == 502
            assert got.json["error"]["code"] == "worker_failed"
            row = await world.settled()
            assert (row.status, row.error) == (502, "worker_failed")
            assert (await world.ask({"model": "other"})).json["error"]["code"] == "model_not_found"

    asyncio.run(main())


def test_retries_stay_a_small_part_of_all_requests() -> None:
    async def main() -> None:
        async with World(proxy=replace(PATIENT, retry_share=0.1, retries=50)) as world:
            worker = await world.add("a", answers({"error": {}}, 429))
            for _ in range(50):
                await world.ask(CHAT)
            # The budget starts with 20 retries, and each request adds a tenth.
            assert 70 <= len(worker.bodies) <= 76

    asyncio.run(main())


def test_a_foreign_stream_that_breaks_ends_with_an_error_and_no_done() -> None:
    async def main() -> None:
        async with World() as world:
            for name in "ab":
                await world.add(name, streams(chunk("a"), b"data: {torn", cut=True, pause_s=0.01))
            got = await world.ask(STREAM)
            assert got.status == 200
            first, error, nothing = got.body.split(b"\n\n")
            assert (first + b"\n\n", nothing) == (chunk("a"), b"")
            assert json.loads(error[6:])["error"]["code"] == "worker_lost"
            row = await world.settled()
            assert (row.status, row.error) == (200, "worker_lost")

    asyncio.run(main())


@pytest.mark.parametrize("dialect", ["stoker", "openai"])
def test_a_worker_lost_after_the_end_of_a_stream_changes_nothing(dialect: str) -> None:
    """Only the end of the connection is missing: no worker resumes the stream, and no error follows."""
    pieces = (b":u 10 3 1000 7\n:t 0 1\n" if dialect == "stoker" else b"", chunk("a") + usage_chunk(10, 4, 2) + DONE)

    async def main() -> None:
        async with World() as world:
            for name in "ab":
                await world.add(name, streams(b"".join(pieces), b"", pause_s=2 * LONG_S), dialect=dialect)
            answer = await world.send(STREAM)
            got: list[bytes] = []
            reading = asyncio.create_task(answer.relay(got.append))
            await until(lambda: b"".join(got).endswith(DONE))
            row_worker = next(name for name, worker in world.workers.items() if worker.bodies)
            world.upstreams.cut(WorkerId(row_worker))
            async with asyncio.timeout(LONG_S):
                await reading
            assert b"".join(got).endswith(DONE)
            assert b"".join(got).count(DONE) == 1
            row = await world.settled()
            assert (row.status, row.error, row.worker, row.resumed) == (200, None, row_worker, 0)
            assert row.prompt_tokens == 10

    asyncio.run(main())


def test_a_stream_cut_after_its_end_is_whole() -> None:
    async def main() -> None:
        async with World() as world:
            await world.add("a", streams(chunk("a"), DONE, cut=True, pause_s=0.01))
            assert (await world.ask(STREAM)).body == chunk("a") + DONE
            assert (await world.settled()).error is None

    asyncio.run(main())


def test_a_worker_that_is_back_is_trusted_from_its_first_token_on() -> None:
    """The breaker closes before the first answer ends: that may take minutes, and other requests would be refused."""

    async def main() -> None:
        async with World() as world:
            await world.add("a", in_turn(streams(chunk("x"), *[chunk("y")] * 1000, pause_s=LONG_S), answers(ANSWER)))
            world.fleet.saw_failure(WorkerId("a"), world.clock.now(), "connect")
            world.fleet.saw_probe(WorkerId("a"), live=True, ready=True, now=world.clock.now())
            first = await world.send(STREAM)
            assert (await world.ask(CHAT)).status == 200
            first.abort()

    asyncio.run(main())


def test_a_slow_unstreamed_answer_does_not_block_a_worker_that_is_back() -> None:
    """An unstreamed answer reports nothing until its end, but it was not cut like the requests that opened the breaker."""

    async def main() -> None:
        async with World() as world:
            a = await world.add("a", hangs())
            for _ in range(3):
                world.fleet.saw_failure(WorkerId("a"), world.clock.now(), "lost")
            world.clock.advance(1.0)
            asking = [asyncio.create_task(world.ask(CHAT))]
            await until(lambda: len(a.bodies) == 1)
            member = world.fleet.member(WorkerId("a"))
            assert member is not None
            assert not member.health.usable(world.clock.now())
            world.clock.advance(10.0)
            asking += [asyncio.create_task(world.ask(CHAT)) for _ in range(3)]
            await until(lambda: len(a.bodies) == 4)
            for one in asking:
                one.cancel()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("kind", "script", "first_byte_s", "status"), [("timeout", hangs(), 0.05, 504), ("lost", drops(), LONG_S, 502)]
)
def test_a_timeout_is_distinguished_from_a_broken_connection(
    kind: str, script: Any, first_byte_s: float, status: int
) -> None:
    async def main() -> None:
        async with World(proxy=replace(PATIENT, first_byte_s=first_byte_s, retries=0)) as world:
            await world.add("a", script)
            assert (await world.ask(CHAT)).status == status
            assert world.metrics.upstream == {("a", kind): 1}

    asyncio.run(main())


def no_file_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this process cannot open connections. Existing ones stay."""

    async def refused(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", refused)


def test_a_gateway_out_of_sockets_reports_it_and_blames_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with World() as world:
            await world.add("a", answers(ANSWER))
            assert (await world.get("/health")).status == 200  # the client has its connection
            no_file_left(monkeypatch)
            got = await world.ask(CHAT)
            assert (got.status, got.json["error"]["code"]) == (503, "no_socket_left")
            assert "retry-after" in got.headers
            monkeypatch.undo()
            assert (await world.ask(CHAT)).status == 200
            assert world.metrics.upstream == {}

    asyncio.run(main())


def test_a_response_that_is_too_large_is_an_error_not_a_crash() -> None:
    async def main() -> None:
        async with World(proxy=replace(PATIENT, max_answer_mib=1e-4)) as world:
            await world.add("a", answers(b"x" * 200))
            got = await world.ask(CHAT)
            assert got.status == 502
            assert got.json["error"]["code"] == "answer_too_large"
            await world.settled()

    asyncio.run(main())

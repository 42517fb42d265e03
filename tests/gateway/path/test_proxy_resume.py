"""Stoker workers that die in mid-stream: the client gets one stream with the bytes of an undisturbed run."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from fake_stoker import FakeStoker
from mocks import answers, drops, hangs, in_turn
from waiting import LONG_S, turns, until
from world import PATIENT, World

from stoker.base.ids import WorkerId
from stoker.fleet.spec import Role

BODY: dict[str, Any] = {"model": "m", "messages": [], "stream": True, "seed": 42, "max_tokens": 8}
USAGE = {"stream_options": {"include_usage": True}}
ID = [(b"x-request-id", b"r1")]


async def undisturbed(body: dict[str, Any]) -> bytes:
    async with World() as world:
        await world.add("a", FakeStoker(), dialect="stoker")
        answer = (await world.ask(body, headers=ID)).body
        assert answer.count(b"[DONE]") == 1
        return answer


@pytest.mark.parametrize("more", [{}, USAGE, {"n": 3, **USAGE}], ids=["plain", "usage", "three"])
@pytest.mark.parametrize("dies", range(8))
@pytest.mark.parametrize("tears", [0, 5, 30])
def test_another_worker_resumes_exactly_after_the_sent_tokens(more: dict[str, Any], dies: int, tears: int) -> None:
    async def main() -> None:
        body = BODY | more
        expected = await undisturbed(body)
        async with World() as world:
            # The second worker would report other numbers: its clock and its cache differ.
            await world.add("a", FakeStoker(dies=[dies], tears=tears), dialect="stoker")
            b = await world.add("b", FakeStoker(created=2000, cached_tokens=9), dialect="stoker")
            got = await world.ask(body, headers=ID)
            row = await world.settled()
            assert row.completion_tokens == 8 * body.get("n", 1)
            assert row.error is None
            assert len(b.bodies) == 1
            if dies == 0:
                # The client had received nothing, so the whole answer is the second worker's.
                assert row.resumed == 0
                assert "resume" not in b.jsons[0]
                assert row.cached_tokens == 9
            else:
                assert got.body == expected
                assert row.resumed == 1
                assert row.cached_tokens == 3
                assert world.metrics.resumes["completed"] == 1

    asyncio.run(main())


@pytest.mark.parametrize("splits", [1, 3, 17])
def test_bytes_may_be_cut_anywhere(splits: int) -> None:
    async def main() -> None:
        body = BODY | USAGE | {"n": 2}
        expected = await undisturbed(body)
        async with World() as world:
            await world.add("a", FakeStoker(dies=[5], tears=20, splits=splits), dialect="stoker")
            await world.add("b", FakeStoker(splits=splits, cached_tokens=9), dialect="stoker")
            assert (await world.ask(body, headers=ID)).body == expected

    asyncio.run(main())


def test_comment_lines_are_hidden_and_a_missing_seed_is_added() -> None:
    async def main() -> None:
        async with World() as world:
            a = await world.add("a", FakeStoker(dies=[3]), dialect="stoker")
            b = await world.add("b", FakeStoker(), dialect="stoker")
            body = {name: value for name, value in BODY.items() if name != "seed"}
            got = await world.ask(body)
            assert got.status == 200
            assert b"\n:" not in b"\n" + got.body
            assert a.headers[0]["x-stoker-stream"] == "1"
            assert a.jsons[0]["seed"] == b.jsons[0]["seed"] >= 0
            assert a.bodies[0] == b'{"seed":%d,' % a.jsons[0]["seed"] + json.dumps(body).encode()[1:]
            assert b.jsons[0]["resume"]["created"] == 1000

    asyncio.run(main())


def test_an_engine_that_dies_inside_its_worker_is_a_death_like_any_other() -> None:
    async def main() -> None:
        expected = await undisturbed(BODY)
        async with World() as world:
            await world.add("a", FakeStoker(fails=[4]), dialect="stoker")
            await world.add("b", FakeStoker(), dialect="stoker")
            assert (await world.ask(BODY, headers=ID)).body == expected
            assert (await world.settled()).resumed == 1

    asyncio.run(main())


def test_a_worker_whose_engine_dies_in_every_answer_gets_a_pause() -> None:
    """The worker ends each stream properly, but with an error event: that does not count as a success."""

    async def main() -> None:
        expected = await undisturbed(BODY)
        async with World() as world:
            a = await world.add("a", FakeStoker(fails=[4] * 9), dialect="stoker")
            await world.add("b", FakeStoker(), dialect="stoker")
            for _ in range(9):
                assert (await world.ask(BODY, headers=ID)).body == expected
            assert len(a.bodies) == 3
            member = world.fleet.member(WorkerId("a"))
            assert member is not None
            assert not member.health.usable(world.clock.now())

    asyncio.run(main())


def test_a_single_worker_that_returns_resumes_its_own_stream() -> None:
    async def main() -> None:
        expected = await undisturbed(BODY)
        async with World(resume_grace_s=5.0) as world:
            worker = await world.add("a", FakeStoker(dies=[4]), dialect="stoker")
            asking = asyncio.create_task(world.ask(BODY, headers=ID))
            await until(lambda: len(worker.bodies) == 1 and worker.num_running == 0)
            await worker.stop()
            await until(lambda: world.metrics.upstream["a", "connect"] > 0)
            await worker.start()
            world.clock.advance(2.0)  # it may be retried
            assert (await asking).body == expected
            assert (await world.settled()).resumed == 1

    asyncio.run(main())


def test_a_single_worker_that_registers_again_resumes_its_own_stream() -> None:
    async def main() -> None:
        expected = await undisturbed(BODY)
        async with World(resume_grace_s=5.0) as world:
            worker = await world.add("a", FakeStoker(dies=[4]), dialect="stoker")
            asking = asyncio.create_task(world.ask(BODY, headers=ID))
            await until(lambda: len(worker.bodies) == 1)
            world.fleet.remove(WorkerId("a"), world.clock.now())
            await until(lambda: worker.num_running == 0)
            await turns(100)
            world.register("a", dialect="stoker")
            assert (await asking).body == expected
            assert (await world.settled()).resumed == 1

    asyncio.run(main())


def test_all_streams_of_a_lone_worker_go_on_when_it_is_back_and_none_waits_for_another_to_end() -> None:
    async def main() -> None:
        body = BODY | {"max_tokens": 60}
        expected = await undisturbed(body)
        async with World(resume_grace_s=10.0) as world:
            await world.add("a", FakeStoker(dies=[3] * 4, pace_s=0.03), dialect="stoker")

            async def tick() -> None:
                while True:
                    world.clock.advance(0.02)  # an answer takes longer than resume_grace_s
                    await asyncio.sleep(0.002)

            ticking = asyncio.create_task(tick())
            got = await asyncio.gather(*(world.ask(body, headers=ID) for _ in range(4)))
            ticking.cancel()
            assert [one.body for one in got] == [expected] * 4

    asyncio.run(main())


def test_three_workers_may_die_but_not_four() -> None:
    async def main() -> None:
        body = BODY | {"max_tokens": 170}
        expected = await undisturbed(body)
        async with World() as world:
            for name in "abc":
                await world.add(name, FakeStoker(dies=[40]), dialect="stoker")
            await world.add("d", FakeStoker(), dialect="stoker")
            assert (await world.ask(body, headers=ID)).body == expected
            assert (await world.settled()).resumed == 3
        async with World() as world:
            for name in "abcd":
                await world.add(name, FakeStoker(dies=[40, 40, 40]), dialect="stoker")
            await world.add("e", FakeStoker(), dialect="stoker")
            got = await world.ask(body, headers=ID)
            assert b"[DONE]" not in got.body
            *_, error, _ = got.body.split(b"\n\n")
            assert json.loads(error[6:])["error"]["code"] == "worker_lost"
            row = await world.settled()
            assert row.error == "worker_lost"
            assert row.completion_tokens == 160
            assert world.metrics.resumes["failed"] == 1

    asyncio.run(main())


@pytest.mark.parametrize("how", ["dies", "fails"])
def test_a_stream_that_dies_at_the_same_place_on_two_workers_goes_to_no_third(how: str) -> None:
    """A request of death: without the guard it would kill one worker after another until `resume_grace_s` has passed."""

    async def main() -> None:
        async with World() as world:
            for name in "abcd":
                await world.add(name, FakeStoker(**{how: [3 if name == "a" else 2] * 9}), dialect="stoker")
            got = await world.ask(BODY, headers=ID)
            *_, error, _ = got.body.split(b"\n\n")
            assert json.loads(error[6:])["error"]["code"] == "worker_lost"
            assert b"127.0.0.1" not in got.body
            assert sum(len(worker.bodies) for worker in world.workers.values()) == 2
            assert (await world.settled()).error == "worker_lost"

    asyncio.run(main())


def test_a_stream_without_a_successor_ends_with_an_error_in_time() -> None:
    async def main() -> None:
        async with World(resume_grace_s=2.0) as world:
            worker = await world.add("a", FakeStoker(dies=[4]), dialect="stoker")
            asking = asyncio.create_task(world.ask(BODY, headers=ID))
            await until(lambda: len(worker.bodies) == 1 and worker.num_running == 0)
            await worker.stop()
            for num_failures in (1, 2):
                await until(lambda wanted=num_failures: world.metrics.upstream["a", "connect"] == wanted)  # type: ignore[misc]
                await turns()
                assert not asking.done()
                world.clock.advance(
                    1.2
                )  # it is retried after the first failure; after the second one the grace period is over
            got = await asking
            assert b"worker_lost" in got.body
            assert b"[DONE]" not in got.body
            row = await world.settled()
            assert (row.status, row.error, row.completion_tokens) == (200, "worker_lost", 4)
            assert (row.prompt_tokens, row.cached_tokens) == (10, 3)

    asyncio.run(main())


def test_a_stoker_stream_is_never_resumed_by_a_foreign_worker() -> None:
    async def main() -> None:
        async with World(resume_grace_s=5.0) as world:
            await world.add("a", FakeStoker(dies=[4]), dialect="stoker")
            foreign = await world.add("f", FakeStoker(), dialect="openai")
            world.fleet.drain(WorkerId("f"), world.clock.now())
            asking = asyncio.create_task(world.ask(BODY))
            await until(lambda: len(world.workers["a"].bodies) == 1)
            world.fleet.drain(WorkerId("f"), world.clock.now(), False)
            await world.workers["a"].stop()
            await until(lambda: world.metrics.upstream["a", "connect"] > 0)
            await turns()
            world.clock.advance(10.0)
            assert b"worker_lost" in (await asking).body
            assert foreign.bodies == []

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize(
    "said", [b"<html>\n\ntoo large\n</html>", b'{\n\n"error": {"message": "no", "code": 413}}', b""]
)
def test_whatever_refuses_to_go_on_the_stream_ends_with_one_readable_error(path: str, said: bytes) -> None:
    """A proxy between gateway and worker may send errors of its own shape."""

    async def main() -> None:
        async with World() as world:
            script = in_turn(FakeStoker(dies=[4]), answers(said, 413))
            for name in "ab":
                await world.add(name, script, dialect="stoker")
            got = await world.ask(BODY, path, headers=ID)
            *_, last, end = got.body.split(b"\n\n")
            assert end == b""
            error = json.loads(last[last.index(b"data: ") + 6 :])
            error = error if path == "/v1/responses" else error["error"]
            assert error["code"] == "worker_refused"
            assert "413" in error["message"]
            assert (await world.settled()).error == "worker_refused"

    asyncio.run(main())


def test_a_client_that_leaves_while_its_stream_is_being_saved() -> None:
    async def main() -> None:
        async with World(resume_grace_s=5.0) as world:
            worker = await world.add("a", FakeStoker(dies=[4]), dialect="stoker")
            asking = asyncio.create_task(world.ask(BODY))
            await until(lambda: len(worker.bodies) == 1 and worker.num_running == 0)
            await worker.stop()
            await until(lambda: world.metrics.upstream["a", "connect"] > 0)
            asking.cancel()
            row = await world.settled()
            assert (row.status, row.completion_tokens) == (499, 4)

    asyncio.run(main())


def test_an_unstreamed_request_is_retried_with_the_same_seed() -> None:
    async def main() -> None:
        async with World() as world:
            a = await world.add("a", FakeStoker(dies=[0]), dialect="stoker")
            b = await world.add("b", FakeStoker(), dialect="stoker")
            got = await world.ask({"model": "m", "max_tokens": 4})
            assert got.status == 200
            assert a.jsons[0] == b.jsons[0]
            assert a.jsons[0]["seed"] is not None
            assert "x-stoker-stream" not in a.headers[0]
            row = await world.settled()
            assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (10, 3, 4)

    asyncio.run(main())


# ---- hand-off


async def pair(world: World, prefill: FakeStoker, decode: FakeStoker) -> None:
    await world.add("p", prefill, role=Role.PREFILL, dialect="stoker")
    await world.add("d", decode, role=Role.DECODE, dialect="stoker")


@pytest.mark.parametrize("more", [{}, USAGE, {"n": 3, **USAGE}], ids=["plain", "usage", "three"])
def test_a_hand_off_is_a_planned_resume(more: dict[str, Any]) -> None:
    async def main() -> None:
        body = BODY | more
        expected = await undisturbed(body)
        async with World(prompt_tokens=5000, policy="least_tokens") as world:
            await pair(world, FakeStoker(), FakeStoker(created=2000, cached_tokens=10))
            got = await world.ask(body, headers=ID)
            assert got.body == expected
            p, d = world.workers["p"], world.workers["d"]
            [sent] = p.jsons
            transfer = sent.pop("kv_transfer_params")
            assert sent == body
            assert transfer == {"do_remote_decode": True, "transfer_id": transfer["transfer_id"]}
            [sent] = d.jsons
            assert sent.pop("kv_transfer_params") == {"remote_host": "10.0.0.1", "block keys": ["a b"]}
            resume = sent.pop("resume")
            assert resume["created"] == 1000
            assert [len(choice["token_ids"]) for choice in resume["choices"]] == [1] * body.get("n", 1)
            assert sent == body
            row = await world.settled()
            assert (row.worker, row.resumed, row.cached_tokens) == ("d", 0, 3)

    asyncio.run(main())


def test_an_unstreamed_request_is_handed_off_too() -> None:
    async def main() -> None:
        body = {"model": "m", "max_tokens": 6, "seed": 42}
        async with World() as world:
            await world.add("a", FakeStoker(), dialect="stoker")
            expected = (await world.ask(body, headers=ID)).json
        async with World(prompt_tokens=5000, policy="least_tokens") as world:
            await pair(world, FakeStoker(), FakeStoker(created=2000, cached_tokens=10))
            assert (await world.ask(body, headers=ID)).json == expected
            assert world.workers["p"].jsons[0]["stream"] is True
            assert "stream" not in world.workers["d"].jsons[0]
            assert (await world.settled()).cached_tokens == 3

    asyncio.run(main())


def test_an_answer_that_never_arrived_is_not_billed() -> None:
    async def main() -> None:
        async with World(prompt_tokens=1000, proxy=replace(PATIENT, retries=0)) as world:
            await world.add("p", FakeStoker(), role=Role.PREFILL, dialect="stoker")
            await world.add("d", drops(), role=Role.DECODE, dialect="stoker")
            got = await world.ask({**BODY, "stream": False})
            row = await world.settled()
            assert got.status == row.status == 502
            assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (0, 0, 0)

    asyncio.run(main())


def test_an_answer_of_one_token_needs_no_decode_worker() -> None:
    async def main() -> None:
        body = BODY | {"max_tokens": 1}
        expected = await undisturbed(body)
        async with World(prompt_tokens=5000, policy="least_tokens") as world:
            await pair(world, FakeStoker(), FakeStoker())
            assert (await world.ask(body, headers=ID)).body == expected
            assert world.workers["d"].bodies == []
            await world.settled()

    asyncio.run(main())


@pytest.mark.parametrize("dies", [0, 1])
def test_a_prefill_worker_that_dies_leaves_the_prompt_to_decode(dies: int) -> None:
    async def main() -> None:
        expected = await undisturbed(BODY)
        async with World(prompt_tokens=5000, policy="least_tokens") as world:
            # With `dies=1` it has sent its token and dies before the ticket is sent.
            await pair(world, FakeStoker(dies=[dies]) if not dies else _DiesBeforeTicket(), FakeStoker())
            assert (await world.ask(BODY, headers=ID)).body == expected
            [sent] = world.workers["d"].jsons
            assert "kv_transfer_params" not in sent
            assert ("resume" in sent) == (dies == 1)
            await world.settled()

    asyncio.run(main())


class _DiesBeforeTicket(FakeStoker):
    async def __call__(self, worker: Any, request: Any) -> None:
        write = request.write
        body = json.loads(request.body)
        assert body["kv_transfer_params"]["do_remote_decode"] is True
        from fake_stoker import _Run
        from mocks import SSE

        run = _Run(self, body, request)
        request.start(200, SSE)
        write(b":u 10 3 1000 42\n:t 0 %d\n" % run.token(0, 0) + run.event(0, 0))
        await asyncio.sleep(0.02)
        request.abort()


def test_a_decode_worker_that_dies_after_a_hand_off_is_replaced() -> None:
    async def main() -> None:
        expected = await undisturbed(BODY)
        async with World(prompt_tokens=5000, policy="least_tokens") as world:
            await pair(world, FakeStoker(), FakeStoker(dies=[2]))
            await world.add("u", FakeStoker(created=3000), dialect="stoker")
            world.fleet.drain(WorkerId("u"), world.clock.now())
            asking = asyncio.create_task(world.ask(BODY, headers=ID))
            await until(lambda: len(world.workers["d"].bodies) == 1)
            world.fleet.drain(WorkerId("u"), world.clock.now(), False)
            assert (await asking).body == expected
            row = await world.settled()
            assert row.resumed == 1

    asyncio.run(main())


@pytest.mark.parametrize("stage", ["before", "during"])
def test_a_silently_stopped_worker_is_left_once_detected(stage: str) -> None:
    async def main() -> None:
        expected = await undisturbed(BODY)
        async with World() as world:
            # It hangs without a byte, or after one token.
            script: Any = hangs() if stage == "before" else FakeStoker(pace_s=2 * LONG_S)
            a = await world.add("a", script, dialect="stoker")
            await world.add("b", FakeStoker(), dialect="stoker")
            asking = asyncio.create_task(world.ask(BODY, headers=ID))
            await until(lambda: a.num_running == 1)
            await turns()
            assert not asking.done()
            world.upstreams.cut(WorkerId("a"))
            assert (await asking).body == expected
            await until(lambda: a.num_gone == 1)
            row = await world.settled()
            assert (row.worker, row.resumed) == ("b", int(stage == "during"))

    asyncio.run(main())

"""What every registered dialect must hold, with one worker and with a prefill/decode pair.

A new dialect is found here by itself. With one worker it is tested against a plain OpenAI server. If it uses prefill workers,
it needs an entry in `PAIRS` of tests/gateway/pair_mocks.py that simulates its pair; without one,
`test_a_dialect_with_pairs_has_a_mock` fails and says so.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest
from fake_stoker import FakeStoker
from mocks import DONE, answers, chunk, drops, event, in_turn, streams, usage
from pair_mocks import PAIRS, PairState, add_pair, world_of_pairs
from waiting import LONG_S, turns, until
from world import World

from stoker.fleet.spec import Role
from stoker.gateway.path.dialects.dialect import DIALECTS
from stoker.gateway.watch.load_probe import LoadUnavailable

NAMES = sorted(DIALECTS)
PAIRED = sorted(PAIRS)
BODY: dict[str, Any] = {"model": "m", "seed": 7, "max_tokens": 8}
STREAM = BODY | {"stream": True}
WITH_USAGE = STREAM | {"stream_options": {"include_usage": True}}


@pytest.fixture(autouse=True)
def prefill_replies_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.gateway.path.dialects.foreign._PREFILL_REPLY_S", LONG_S)


# ---- one worker


@pytest.mark.parametrize("dialect", NAMES)
def test_a_whole_answer_passes_unchanged(dialect: str) -> None:
    answer = json.dumps({"id": "c", "choices": [], "x": [1, 2], "usage": usage(10, 4, 2)}, indent=1).encode()

    async def main() -> None:
        async with World() as world:
            await world.add("a", answers(answer), dialect=dialect)
            assert (await world.ask(BODY)).body == answer

    asyncio.run(main())


@pytest.mark.parametrize("dialect", NAMES)
def test_a_stream_passes_unchanged_however_it_is_split(dialect: str) -> None:
    sent = chunk("a") + chunk("b\u00e9") + event({"x": "\n"}) + DONE

    async def main() -> None:
        async with World() as world:
            pieces = [sent[at : at + 7] for at in range(0, len(sent), 7)]
            await world.add("a", streams(*pieces), dialect=dialect)
            assert (await world.ask(STREAM)).body == sent

    asyncio.run(main())


@pytest.mark.parametrize("dialect", NAMES)
@pytest.mark.parametrize("body", [BODY, STREAM, WITH_USAGE], ids=["whole", "stream", "stream_with_usage"])
def test_usage_is_billed_and_shown_only_to_clients_that_requested_it(dialect: str, body: dict[str, Any]) -> None:
    async def main() -> None:
        async with World() as world:
            await world.add("a", FakeStoker(), dialect=dialect)
            got = await world.ask(body)
            assert got.status == 200
            assert got.body.endswith(DONE) == bool(body.get("stream"))
            assert got.body.count(b'"usage"') == (body != STREAM)
            row = await world.settled()
            assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (10, 3, 8)

    asyncio.run(main())


@pytest.mark.parametrize("dialect", NAMES)
@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("failing", [drops(), answers({"error": {}}, 503)], ids=["connection_lost", "status_503"])
def test_a_failure_before_the_first_byte_is_retried_on_another_worker(
    dialect: str, body: dict[str, Any], failing: Any
) -> None:
    async def main() -> None:
        async with World() as world:
            first = await world.add("a", failing, dialect=dialect)
            await world.add("b", FakeStoker(), dialect=dialect)
            assert (await world.ask(body)).status == 200
            assert len(first.bodies) == 1
            row = await world.settled()
            assert (row.worker, row.completion_tokens) == ("b", 8)

    asyncio.run(main())


@pytest.mark.parametrize("dialect", NAMES)
def test_a_workers_refusal_is_the_clients_answer(dialect: str) -> None:
    refusal = {"error": {"message": "too long", "type": "x", "param": None, "code": "context_length_exceeded"}}

    async def main() -> None:
        async with World() as world:
            worker = await world.add("a", answers(refusal, 400), dialect=dialect)
            got = await world.ask(BODY)
            assert (got.status, got.json) == (400, refusal)
            assert len(worker.bodies) == 1
            await world.settled()

    asyncio.run(main())


@pytest.mark.parametrize("dialect", NAMES)
def test_nothing_stays_open_when_the_client_disconnects(dialect: str) -> None:
    async def main() -> None:
        async with World() as world:
            worker = await world.add("a", FakeStoker(pace_s=2 * LONG_S), dialect=dialect)
            asking = asyncio.create_task(world.ask(STREAM))
            await until(lambda: worker.num_running == 1)
            await turns()
            asking.cancel()
            await until(lambda: worker.num_gone == 1)
            assert (await world.settled()).status == 499

    asyncio.run(main())


@pytest.mark.parametrize("dialect", NAMES)
def test_a_broken_stream_ends_with_an_error_or_is_resumed(dialect: str) -> None:
    async def main() -> None:
        async with World(resume_grace_s=0.0) as world:
            await world.add("a", in_turn(FakeStoker(dies=[3]), drops()), dialect=dialect)
            got = await world.ask(STREAM)
            assert DONE not in got.body
            *_, error, _ = got.body.split(b"\n\n")
            assert json.loads(error[6:])["error"]["code"] == "worker_lost"
            assert (await world.settled()).error == "worker_lost"
        async with World() as world:
            await world.add("a", FakeStoker(dies=[3]), dialect=dialect)
            await world.add("b", FakeStoker(), dialect=dialect)
            got = await world.ask(STREAM)
            assert got.body.endswith(DONE) == DIALECTS.get(dialect).resumes
            await world.settled()

    asyncio.run(main())


@pytest.mark.parametrize("dialect", NAMES)
def test_a_worker_without_a_load_page_has_no_load(dialect: str) -> None:
    async def get(path: bytes) -> tuple[int, bytes]:
        return 404, b'{"detail":"Not Found"}'

    async def main() -> None:
        probe = DIALECTS.get(dialect).load_probe()
        await probe.learn(get)
        with suppress(LoadUnavailable):
            assert await probe.read(get) is None

    asyncio.run(main())


# ---- a prefill and a decode worker


@pytest.mark.parametrize("dialect", NAMES)
def test_a_dialect_with_pairs_has_a_mock(dialect: str) -> None:
    async def main() -> None:
        async with world_of_pairs() as world:
            prefill = await world.add("p", drops(), role=Role.PREFILL, dialect=dialect)
            await world.add("d", FakeStoker(), role=Role.DECODE, dialect=dialect)
            await world.ask(STREAM)
            await world.settled()
            if prefill.bodies and dialect not in PAIRS:
                pytest.fail(
                    f"the dialect {dialect!r} sends requests to prefill workers, but this suite cannot simulate them: "
                    f"add a PairMock under {dialect!r} to PAIRS in tests/gateway/pair_mocks.py"
                )

    asyncio.run(main())


@pytest.mark.parametrize("dialect", PAIRED)
@pytest.mark.parametrize("body", [BODY, STREAM, WITH_USAGE], ids=["whole", "stream", "stream_with_usage"])
def test_a_pair_serves_a_request_and_cached_tokens_are_those_of_prefill(dialect: str, body: dict[str, Any]) -> None:
    async def main() -> None:
        async with world_of_pairs() as world:
            await add_pair(world, dialect, PairState())
            got = await world.ask(body)
            assert got.status == 200
            assert got.body.endswith(DONE) == bool(body.get("stream"))
            assert b"kv_transfer_params" not in got.body
            assert "/v1/chat/completions" in world.workers["p"].paths
            row = await world.settled()
            assert row.worker == "d"
            assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == PAIRS[dialect].usage
            assert world.metrics.handoffs == {"done": 1}
            if body != STREAM:
                assert b'"cached_tokens":%d}' % row.cached_tokens in got.body.replace(b" ", b"")

    asyncio.run(main())


@pytest.mark.parametrize("dialect", PAIRED)
def test_nothing_stays_open_on_either_worker_when_the_client_disconnects(dialect: str) -> None:
    async def main() -> None:
        async with world_of_pairs() as world:
            await add_pair(world, dialect, PairState(prefill_s=2 * LONG_S))
            prefill, decode = world.workers["p"], world.workers["d"]
            asking = asyncio.create_task(world.ask(STREAM))
            await until(lambda: "/v1/chat/completions" in prefill.paths)
            await turns()
            asking.cancel()
            await until(lambda: prefill.num_running == 0 and decode.num_running == 0)
            assert (await world.settled()).status == 499

    asyncio.run(main())


@pytest.mark.parametrize("dialect", PAIRED)
@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
def test_a_failing_prefill_worker_does_not_fail_the_request(dialect: str, body: dict[str, Any]) -> None:
    """Decode computes the prompt where it can; elsewhere another prefill worker does."""

    async def main() -> None:
        async with world_of_pairs() as world:
            state = PairState()
            await add_pair(world, dialect, state, prefill=drops())
            if not DIALECTS.get(dialect).decodes_alone:
                await world.add("p2", PAIRS[dialect].prefill(state), role=Role.PREFILL, dialect=dialect)
            assert (await world.ask(body)).status == 200
            decode = world.workers["d"]
            await until(lambda: decode.num_running == 0)
            assert (await world.settled()).worker == "d"

    asyncio.run(main())

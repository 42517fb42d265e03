"""Golden transcripts: the exact bytes sent to prefill and decode workers of other engines, and what the client gets."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from mocks import DONE, answers, chunk, drops, event, hangs, usage, usage_chunk
from pair_mocks import TICKET, PairState, add_pair, world_of_pairs
from waiting import LONG_S, until

from stoker.base.ids import WorkerId
from stoker.fleet.spec import Role
from stoker.gateway.path.dialects.foreign import together
from stoker.gateway.path.errors import LegFailed
from stoker.gateway.path.upstream import CancelOnLoss

PAIRED = ["sglang", "vllm", "vllm_mooncake"]
WHOLE = b'{"model": "m", "messages": [{"role": "user", "content": "h\\u00e9"}], "max_tokens": 64}'
STREAM = b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "h\\u00e9"}], "min_tokens": 5}'
SHOWN = chunk("a") + chunk("b") + event({"id": "c1", "choices": [], "x": 1}) + DONE


@pytest.fixture(autouse=True)
def prefills_last_word_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.gateway.path.dialects.foreign._PREFILL_REPLY_S", LONG_S)


def test_vllm_nixl_stream() -> None:
    async def main() -> None:
        async with world_of_pairs() as world:
            await add_pair(world, "vllm", PairState())
            got = await world.ask(STREAM, headers=[(b"x-request-id", b"r1")])
            assert got.body == SHOWN
            p, d = world.workers["p"], world.workers["d"]
            assert p.bodies == [
                b'{"model":"m","stream":false,"messages":[{"role": "user", "content": "h\\u00e9"}],"max_tokens":1,'
                b'"max_completion_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,'
                b'"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}'
            ]
            assert d.bodies == [
                b'{"kv_transfer_params":'
                + TICKET
                + b',"stream_options":{"include_usage":true,"continuous_usage_stats":true},'
                + STREAM[1:]
            ]
            assert p.headers[0]["x-request-id"] == d.headers[0]["x-request-id"] == "r1"
            row = await world.settled()
            assert (row.worker, row.prompt_tokens, row.cached_tokens, row.completion_tokens) == ("d", 40, 8, 2)

    asyncio.run(main())


def test_vllm_nixl_whole() -> None:
    async def main() -> None:
        async with world_of_pairs() as world:
            await add_pair(world, "vllm", PairState())
            got = await world.ask(WHOLE)
            assert got.json == {
                "id": "c",
                "choices": [{"index": 0, "message": {"content": "ab"}}],
                "usage": usage(40, 8, 2),
            }
            p, d = world.workers["p"], world.workers["d"]
            assert p.bodies == [
                b'{"model":"m","messages":[{"role": "user", "content": "h\\u00e9"}],"max_tokens":1,"stream":false,'
                b'"max_completion_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,'
                b'"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}'
            ]
            assert d.bodies == [b'{"kv_transfer_params":' + TICKET + b"," + WHOLE[1:]]
            await world.settled()

    asyncio.run(main())


@pytest.mark.parametrize("body", [WHOLE, STREAM])
def test_vllm_mooncake(body: bytes) -> None:
    async def main() -> None:
        async with world_of_pairs() as world:
            await add_pair(world, "vllm_mooncake", PairState())
            for _ in range(2):
                got = await world.ask(body)
                assert got.body == SHOWN or got.json["usage"] == usage(40, 8, 2)
            p, d = world.workers["p"], world.workers["d"]
            assert p.paths == ["/query", "/v1/chat/completions", "/v1/chat/completions"]  # queried once
            for sent, taken, headers in zip(p.bodies[1:], d.bodies, p.headers[1:], strict=True):
                [transfer_id] = re.findall(rb'"transfer_id":"(xfer-[0-9a-f]{32})"', sent)
                asked = json.loads(sent)
                assert (asked["stream"], asked["max_tokens"], asked["max_completion_tokens"]) == (False, 1, 1)
                assert not {"min_tokens", "stream_options"} & set(asked)
                assert sent.endswith(
                    b'"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"%b"}}'
                    % transfer_id
                )
                more = (
                    b'"stream_options":{"include_usage":true,"continuous_usage_stats":true},' if body == STREAM else b""
                )
                assert taken == (
                    b'{"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"transfer_id":"%b",'
                    b'"remote_bootstrap_addr":"http://127.0.0.1:%d","remote_engine_id":"e-0"},%b%b'
                    % (transfer_id, p.port, more, body[1:])
                )
                assert headers["x-data-parallel-rank"] == "0"
            assert len({json.loads(sent)["kv_transfer_params"]["transfer_id"] for sent in p.bodies[1:]}) == 2
            assert {row.cached_tokens for row in world.rows.rows} == {8}

    asyncio.run(main())


@pytest.mark.parametrize("body", [WHOLE, STREAM])
def test_sglang(body: bytes) -> None:
    async def main() -> None:
        async with world_of_pairs() as world:
            await add_pair(world, "sglang", PairState())
            got = await world.ask(body)
            assert got.body == SHOWN or got.json["usage"] == usage(40, 8, 2)
            p, d = world.workers["p"], world.workers["d"]
            assert p.bodies == d.bodies  # identical bodies
            [room] = re.findall(rb'"bootstrap_room":(\d+)', p.bodies[0])
            assert 0 <= int(room) < 1 << 63
            more = b'"stream_options":{"include_usage":true,"continuous_usage_stats":true},' if body == STREAM else b""
            assert p.bodies[0] == (
                b'{"bootstrap_host":"127.0.0.1","bootstrap_port":%d,"bootstrap_room":%b,%b%b'
                % (p.port, room, more, body[1:])
            )
            row = await world.settled()
            assert (row.worker, row.cached_tokens) == ("d", 8)

    asyncio.run(main())


@pytest.mark.parametrize("dialect", PAIRED)
def test_requested_usage_has_the_cached_tokens_of_prefill(dialect: str) -> None:
    async def main() -> None:
        async with world_of_pairs() as world:
            await add_pair(world, dialect, PairState())
            body = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
            got = await world.ask(body)
            told = [json.loads(line[6:]) for line in got.body.split(b"\n") if b'"usage"' in line]
            assert told == [json.loads(usage_chunk(40, 8, 2)[6:])]

    asyncio.run(main())


@pytest.mark.parametrize("dialect", ["vllm", "vllm_mooncake"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "m", "n": 2}),
        ("/v1/completions", {"model": "m", "prompt": ["a", "b"]}),
    ],
)
def test_requests_that_cannot_be_handed_off_run_on_decode(dialect: str, path: str, body: dict[str, Any]) -> None:
    async def main() -> None:
        async with world_of_pairs() as world:
            await add_pair(world, dialect, PairState())
            assert (await world.ask(body, path)).status == 200
            assert world.workers["p"].bodies == []
            assert world.workers["d"].jsons == [body]
            await world.settled()

    asyncio.run(main())


@pytest.mark.parametrize("dialect", PAIRED)
@pytest.mark.parametrize("body", [WHOLE, STREAM])
def test_prefills_error_is_passed_to_the_client(dialect: str, body: bytes) -> None:
    async def main() -> None:
        async with world_of_pairs() as world:
            said = {"error": {"message": "too long", "type": "x", "param": None, "code": "context_length_exceeded"}}
            query = answers(b'{"0": {"engine_id": "e-0"}}')

            async def refuses(worker: Any, request: Any) -> None:
                await (query if request.path == b"/query" else answers(said, 400))(worker, request)

            await add_pair(world, dialect, PairState(), prefill=refuses)
            got = await world.ask(body)
            assert (got.status, got.json) == (400, said)
            await world.settled()
            d = world.workers["d"]
            await until(lambda: d.num_running == 0)  # decode does not wait for blocks that never come

    asyncio.run(main())


@pytest.mark.parametrize("dialect", ["vllm", "vllm_mooncake"])
@pytest.mark.parametrize("failing", [drops(), answers({"error": {}}, 500), answers({"error": {}}, 503)])
@pytest.mark.parametrize("body", [WHOLE, STREAM])
def test_a_prefill_worker_that_fails_leaves_the_prompt_to_decode(dialect: str, failing: Any, body: bytes) -> None:
    async def main() -> None:
        async with world_of_pairs() as world:
            query = answers(b'{"0": {"engine_id": "e-0"}}')

            async def fails(worker: Any, request: Any) -> None:
                await (query if request.path == b"/query" else failing)(worker, request)

            await add_pair(world, dialect, PairState(), prefill=fails)
            got = await world.ask(body)
            assert got.status == 200
            assert b"kv_transfer_params" not in world.workers["d"].bodies[-1]
            d = world.workers["d"]
            await until(lambda: d.num_running == 0)
            row = await world.settled()
            assert row.cached_tokens == 39  # now it is what decode reports

    asyncio.run(main())


def test_a_prefill_worker_that_fails_is_replaced_by_another() -> None:
    async def main() -> None:
        async with world_of_pairs() as world:
            state = PairState()
            await add_pair(world, "sglang", state, prefill=drops())
            other = await world.add("p2", state.sglang_prefill(), role=Role.PREFILL, dialect="sglang")
            for _ in range(2):
                assert (await world.ask(STREAM)).body == SHOWN
            assert len(other.bodies) == 2
            d = world.workers["d"]
            await until(lambda: d.num_running == 0)

    asyncio.run(main())


@pytest.mark.parametrize("dialect", ["vllm_mooncake", "sglang"])
def test_when_prefill_fails_decode_is_aborted(dialect: str) -> None:
    async def main() -> None:
        async with world_of_pairs() as world:

            async def dies(worker: Any, request: Any) -> None:
                if request.path == b"/query":
                    request.respond(200, [], b'{"0": {"engine_id": "e-0"}}')
                    return
                await until(lambda: d.num_running == 1)
                request.abort()

            await add_pair(world, dialect, PairState(), prefill=dies, decode=hangs())
            d = world.workers["d"]
            asking = asyncio.create_task(world.ask(STREAM))
            await until(lambda: d.num_gone == 1)
            asking.cancel()
            await world.settled()

    asyncio.run(main())


@pytest.mark.parametrize("found_out", [True, False], ids=["worker_lost", "client_left"])
def test_a_cancel_in_the_same_turn_as_the_other_legs_failure_is_not_lost(found_out: bool) -> None:
    """The cancellation is raised, and its source is known: a lost worker, or a client that disconnected."""

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        loss_guard = CancelOnLoss(task)

        async def prefill() -> None:
            if found_out:
                loss_guard.cut(WorkerId("p"))
            else:
                task.cancel()
            raise LegFailed(WorkerId("p"), "lost", "cut")

        async def decode(prefilling: asyncio.Task[None]) -> None:
            await asyncio.sleep(2 * LONG_S)

        with pytest.raises(asyncio.CancelledError):
            await together(prefill(), decode)
        assert loss_guard.explains_cancel == found_out
        assert task.cancelling() == int(not found_out)
        task.uncancel()

    asyncio.run(main())


@pytest.mark.parametrize("dialect", ["vllm_mooncake", "sglang"])
def test_when_decode_fails_prefill_is_aborted(dialect: str) -> None:
    async def main() -> None:
        async with world_of_pairs() as world:
            await add_pair(
                world, dialect, PairState(prefill_s=2 * LONG_S), decode=answers({"error": {"message": "no"}}, 400)
            )
            assert (await world.ask(STREAM)).status == 400
            p = world.workers["p"]
            await until(lambda: p.num_gone == 1)
            await world.settled()

    asyncio.run(main())


@pytest.mark.parametrize("body", [WHOLE, STREAM])
def test_a_client_that_disconnects_between_the_legs_leaves_no_blocks_behind(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's prefill worker keeps the blocks until a decode worker has received the request."""
    monkeypatch.setattr("stoker.gateway.path.legs._RELEASE_S", 3.0)

    async def main() -> None:
        async with world_of_pairs() as world:
            state = PairState()
            await add_pair(world, "vllm", state, decode=state.nixl_decode(pause_s=2 * LONG_S))
            d = world.workers["d"]
            asking = asyncio.create_task(world.ask(body))
            await until(lambda: bool(state.held), every_s=0.0)
            asking.cancel()
            await until(lambda: not state.held)
            assert len(d.bodies) == 1
            await until(lambda: d.num_running == 0)  # and it is dropped there
            assert (await world.settled()).status == 499

    asyncio.run(main())


def test_without_kept_blocks_decode_computes_the_prompt() -> None:
    async def main() -> None:
        async with world_of_pairs() as world:
            state = PairState()
            await add_pair(world, "vllm", state, prefill=state.nixl_prefill(ticket=b"null"))
            assert (await world.ask(WHOLE)).status == 200
            assert world.workers["d"].bodies == [WHOLE]
            assert (await world.settled()).cached_tokens == 39

    asyncio.run(main())


def test_a_decode_worker_that_could_not_pull_is_replaced() -> None:
    async def main() -> None:
        async with world_of_pairs() as world:
            state = PairState()
            await add_pair(world, "vllm", state, decode=answers({"error": {"message": "kv load failed"}}, 500))
            good = await world.add("d2", state.nixl_decode(), role=Role.DECODE, dialect="vllm")
            for _ in range(2):
                assert (await world.ask(STREAM)).body == SHOWN
            assert all(b"kv_transfer_params" in body for body in good.bodies)

    asyncio.run(main())


def test_workers_of_two_dialects_do_not_hand_over_to_each_other() -> None:
    async def main() -> None:
        async with world_of_pairs() as world:
            state = PairState()
            p = await world.add("p", state.sglang_prefill(), role=Role.PREFILL, dialect="sglang")
            d = await world.add("d", state.nixl_decode(), role=Role.DECODE, dialect="vllm")
            assert (await world.ask(WHOLE)).status == 200
            assert (p.bodies, d.bodies) == ([], [WHOLE])
            await world.settled()

    asyncio.run(main())


def test_a_decode_only_engine_gets_no_request_without_prefill() -> None:
    async def main() -> None:
        async with world_of_pairs() as world:
            d = await world.add("d", PairState().sglang_decode(), role=Role.DECODE, dialect="sglang")
            got = await world.ask(WHOLE)
            assert (got.status, got.json["error"]["code"]) == (503, "no_worker")
            assert d.bodies == []
            await world.settled()

    asyncio.run(main())

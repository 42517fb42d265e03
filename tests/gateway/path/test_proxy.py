"""The request path with plain workers: bytes pass unchanged, usage is metered, one row per request."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from mocks import DONE, SSE, MockWorker, answers, chunk, drops, hangs, in_turn, streams, usage, usage_chunk
from waiting import LONG_S, settled, turns, until
from world import NOTHING, PATIENT, World

from stoker.base.ids import WorkerId
from stoker.gateway.http import HttpRequest, Server, ServerLimits
from stoker.gateway.key_settings import KeySettings

CHAT = b'{"model": "m",  "messages": [{"role": "user", "content": "hi"}]}'
STREAM = b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "hi"}]}'
ANSWER = json.dumps({"id": "c", "choices": [], "usage": usage(10, 4, 2)}).encode()


def test_an_unstreamed_request_and_answer_pass_unchanged() -> None:
    async def main() -> None:
        async with World() as world:
            worker = await world.add("a", answers(ANSWER, headers=[(b"x-model", b"m1"), (b"x-stoker-inside", b"1")]))
            headers = [
                (b"content-type", b"application/json"),
                (b"authorization", b"Bearer client"),
                (b"x-stoker-stream", b"1"),
                (b"x-override-bootstrap-room", b"1"),
                (b"x-data-parallel-rank", b"3"),
                (b"accept-encoding", b"gzip"),
                (b"connection", b"keep-alive, x-hop"),
                (b"x-hop", b"1"),
                (b"x-request-id", b"mine-1"),
                (b"x-custom", b"yes"),
            ]
            got = await world.ask(CHAT, headers=headers)
            assert (got.status, got.body) == (200, ANSWER)
            assert got.headers["x-request-id"] == "mine-1"
            assert got.headers["x-model"] == "m1"
            assert "x-stoker-inside" not in got.headers
            assert worker.bodies == [CHAT]
            [seen] = worker.headers
            assert seen == {
                "host": f"127.0.0.1:{worker.port}",
                "content-type": "application/json",
                "x-custom": "yes",
                "x-request-id": "mine-1",
            }
            row = await world.settled()
            assert (row.status, row.worker, row.endpoint, row.model) == (200, "a", "chat", "m")
            assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (10, 4, 2)
            assert row.request_id != "mine-1"

    asyncio.run(main())


def test_an_odd_request_id_is_replaced() -> None:
    async def main() -> None:
        async with World() as world:
            worker = await world.add("a", answers(ANSWER))
            got = await world.ask(CHAT, headers=[(b"x-request-id", b"has blanks")])
            assert got.headers["x-request-id"].startswith("req_")
            assert worker.headers[0]["x-request-id"] == got.headers["x-request-id"]

    asyncio.run(main())


def test_a_stream_passes_event_by_event_and_its_usage_is_metered_unseen() -> None:
    async def main() -> None:
        async with World() as world:
            pieces: list[bytes] = []

            async def script(worker: MockWorker, request: HttpRequest) -> None:
                request.start(200, SSE)
                for number, piece in enumerate([chunk("a"), chunk("b"), usage_chunk(10, 4, 2) + DONE], 1):
                    request.write(piece)
                    await until(lambda number=number: len(pieces) == number)  # type: ignore[misc]
                request.finish()

            worker = await world.add("a", script)
            answer = await world.send(STREAM)
            await answer.relay(pieces.append)
            assert pieces == [chunk("a"), chunk("b"), DONE]
            assert answer.header(b"content-type") == SSE[0][1]
            assert worker.bodies == [b'{"stream_options":{"include_usage":true},' + STREAM[1:]]
            row = await world.settled()
            assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (10, 4, 2)
            assert row.ttft_ms is not None
            assert row.ttft_ms <= row.e2e_ms

    asyncio.run(main())


def test_a_client_that_asks_for_usage_gets_it() -> None:
    async def main() -> None:
        async with World() as world:
            worker = await world.add("a", streams(chunk("a"), usage_chunk(10, 4, 2), DONE))
            body = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
            got = await world.ask(body)
            assert got.body.count(b'"usage"') == 1
            assert worker.jsons == [body]

    asyncio.run(main())


def test_other_stream_options_are_kept_when_usage_is_requested() -> None:
    async def main() -> None:
        async with World() as world:
            worker = await world.add("a", streams(chunk("a"), usage_chunk(10, 4, 2), DONE))
            got = await world.ask({"model": "m", "stream": True, "stream_options": {"x": [1]}})
            assert got.body == chunk("a") + DONE
            assert worker.jsons[0]["stream_options"] == {"x": [1], "include_usage": True}

    asyncio.run(main())


def test_a_worker_that_refuses_stream_options_is_not_sent_them_again() -> None:
    async def main() -> None:
        async with World() as world:
            refusal = {"error": {"message": "unknown field: stream_options"}}
            worker = await world.add("a", in_turn(answers(refusal, 400), streams(chunk("a"), DONE)))
            for _ in range(2):
                assert (await world.ask(STREAM)).body == chunk("a") + DONE
            assert [b"stream_options" in body for body in worker.bodies] == [True, False, False]

    asyncio.run(main())


@pytest.mark.parametrize("script", [hangs(), streams(chunk("a"), chunk("b"), pause_s=2 * LONG_S)])
@pytest.mark.parametrize("body", [CHAT, STREAM])
def test_a_client_that_leaves_frees_its_worker_at_once(script: Any, body: bytes) -> None:
    async def main() -> None:
        async with World() as world:
            worker = await world.add("a", script)
            asking = asyncio.create_task(world.ask(body))
            await until(lambda: worker.num_running == 1)
            await turns()
            asking.cancel()
            await until(lambda: worker.num_gone == 1)
            row = await world.settled()
            assert (row.status, row.error) == (499, "client_gone")

    asyncio.run(main())


def test_a_client_that_reads_slowly_slows_its_worker_down() -> None:
    piece = chunk("x" * 65536)

    async def main() -> None:
        async with World() as world:
            num_written = 0

            async def pours(worker: MockWorker, request: HttpRequest) -> None:
                nonlocal num_written
                request.start(200, SSE)
                while num_written < 2000:
                    if not request.paused:
                        request.write(piece)
                        num_written += 1
                    await asyncio.sleep(0)
                request.write(DONE)
                request.finish()

            await world.add("a", pours)
            answer = await world.send(STREAM)
            answer.pause()
            assert await settled(lambda: num_written) < 1000
            answer.resume()
            body = await answer.read(1 << 28)
            assert body == piece * 2000 + DONE
            await world.settled()

    asyncio.run(main())


def test_a_prompt_computed_alone_measures_the_prefill_rate() -> None:
    async def main() -> None:
        async with World(prompt_tokens=5000) as world:

            async def computes(worker: MockWorker, request: HttpRequest) -> None:
                world.clock.advance(0.5)
                await streams(chunk("a"), DONE)(worker, request)

            await world.add("a", computes)
            await world.ask(STREAM)
            assert world.fleet.members()[0].rates.prefill_tokens_per_s == 10_000
        async with World(prompt_tokens=100) as world:
            await world.add("a", streams(chunk("a"), DONE))
            await world.ask(STREAM)
            assert world.fleet.members()[0].rates.prefill_tokens_per_s is None

    asyncio.run(main())


def test_the_prompts_reservation_ends_with_the_first_byte() -> None:
    async def main() -> None:
        async with World(prompt_tokens=5000) as world:
            begins, ends = asyncio.Event(), asyncio.Event()

            async def script(worker: MockWorker, request: HttpRequest) -> None:
                request.start(200, SSE)
                await begins.wait()
                request.write(chunk("a"))
                await ends.wait()
                request.write(DONE)
                request.finish()

            worker = await world.add("a", script)
            asking = asyncio.create_task(world.ask(STREAM))
            await until(lambda: worker.num_running == 1)
            assert world.ledger.totals().prefill_tokens == 5000
            begins.set()
            await until(lambda: world.ledger.totals().prefill_tokens == 0)
            assert world.ledger.totals().requests == 1
            assert world.admission.tokens_in_flight == 0
            ends.set()
            await asking
            await world.settled()

    asyncio.run(main())


def test_the_route_header_is_sent_only_if_enabled() -> None:
    async def main() -> None:
        async with World(debug_routes=True, policy="cost") as world:
            await world.add("a", answers(ANSWER))
            told = (await world.ask(CHAT)).headers["x-stoker-route"]
            assert told.startswith("decode=a;policy=cost;cached=0/10;a=")
        async with World() as world:
            await world.add("a", answers(ANSWER))
            assert "x-stoker-route" not in (await world.ask(CHAT)).headers

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "invalid_json"),
        (b'{"model":"m","resume":{}}', "unknown_parameter"),
        (b'{"model":"m","kv_transfer_params":{}}', "unknown_parameter"),
        (b'{"model":"m","bootstrap_room":1}', "unknown_parameter"),
        (b'{"model":"nobody"}', "model_not_found"),
    ],
)
def test_an_invalid_request_is_refused_before_it_reaches_a_worker(body: bytes, code: str) -> None:
    async def main() -> None:
        async with World() as world:
            worker = await world.add("a", answers(ANSWER))
            got = await world.ask(body)
            assert got.status in (400, 404)
            assert got.json["error"]["code"] == code
            assert worker.bodies == []

    asyncio.run(main())


def test_the_tenants_salt_is_prepended_for_dialects_that_support_salts() -> None:
    async def main() -> None:
        key = KeySettings("k", hashlib.sha256(b"secret-key").hexdigest(), tenant="t", priority=5)
        async with World(keys=[key]) as world:
            plain = await world.add("plain", answers(ANSWER))
            assert (await world.ask(CHAT)).status == 401
            headers = [(b"authorization", b"Bearer secret-key")]
            await world.ask(CHAT, headers=headers)
            assert plain.bodies == [CHAT]
            world.fleet.remove(WorkerId("plain"), world.clock.now())
            engine = await world.add("engine", answers(ANSWER), dialect="vllm")
            await world.ask(CHAT, headers=headers)
            await world.ask({"model": "m", "cache_salt": "mine", "priority": 1}, headers=headers)
            assert engine.bodies[0] == b'{"cache_salt":"tenant:t",' + CHAT[1:]
            assert engine.jsons[1] == {"model": "m", "cache_salt": "tenant:t:mine", "priority": 5}
            assert world.rows.rows[-1].tenant == "t"

    asyncio.run(main())


def test_a_stoker_worker_is_told_the_tenant_and_its_weight() -> None:
    async def main() -> None:
        key = KeySettings("k", hashlib.sha256(b"secret-key").hexdigest(), tenant="t")
        async with World(keys=[key]) as world:
            worker = await world.add("a", answers(ANSWER), dialect="stoker")
            await world.ask({"model": "m"}, headers=[(b"authorization", b"Bearer secret-key")])
            assert worker.jsons[0]["tenant_share"] == {"tenant": "t", "weight": 1.0}
        async with World() as world:
            worker = await world.add("a", answers(ANSWER), dialect="stoker")
            await world.ask({"model": "m"})
            assert "tenant_share" not in worker.jsons[0]

    asyncio.run(main())


def test_an_option_for_the_gateway_is_not_passed_on() -> None:
    async def main() -> None:
        async with World() as world:
            worker = await world.add("a", answers(ANSWER))
            await world.ask(
                {"model": "m", "rejectIfBusy": True, "temperature": 0.5}, headers=[(b"x-reject-if-busy", b"1")]
            )
            assert worker.jsons == [{"model": "m", "temperature": 0.5}]
            assert "x-reject-if-busy" not in worker.headers[0]

    asyncio.run(main())


def test_the_model_may_be_omitted_if_only_one_is_served() -> None:
    async def main() -> None:
        async with World() as world:
            worker = await world.add("a", answers(ANSWER))
            assert (await world.ask({"messages": []})).status == 200
            assert worker.jsons == [{"messages": []}]

    asyncio.run(main())


def test_the_other_paths() -> None:
    async def main() -> None:
        async with World() as world:
            assert (await world.get("/ready")).status == 503
            await world.add("a", answers(ANSWER))
            assert (await world.get("/health")).json == {"status": "ok", "store": "ok"}
            assert (await world.get("/ready")).status == 200
            assert [card["id"] for card in (await world.get("/v1/models")).json["data"]] == ["m"]
            assert (await world.get("/v1/models/m")).json["id"] == "m"
            assert (await world.get("/v1/models/x")).status == 404
            assert (await world.ask({}, "/v1/models/m")).status == 405  # models cannot be changed or deleted here
            assert (await world.get("/v1/nothing")).json["error"]["code"] == "unknown_url"
            assert (await world.get("/v1/chat/completions")).status == 405
            assert b"stoker_gateway_requests_total" in (await world.get("/metrics")).body
            for path in ("/admin/fleet", "/v1/usage", "/stoker/register"):
                assert (await world.get(path)).json == {"part": path}

    asyncio.run(main())


@pytest.mark.parametrize("path", ["org/a:b%20c", "org%2Fa%3Ab%20c"])
def test_a_model_is_found_by_its_name_however_a_client_escapes_it(path: str) -> None:
    async def main() -> None:
        async with World() as world:
            await world.add("a", answers(ANSWER))
            world.fleet.add(replace(world.fleet.members()[0].spec, models=("org/a:b c",)), world.clock.now())
            assert (await world.get(f"/v1/models/{path}")).json["id"] == "org/a:b c"
            assert (await world.get("/v1%2Fmodels")).status == 404

    asyncio.run(main())


def test_a_draining_gateway_ends_what_it_has_and_takes_no_more() -> None:
    async def main() -> None:
        async with World() as world:
            asked = asyncio.Event()

            async def script(worker: MockWorker, request: HttpRequest) -> None:
                request.start(200, SSE)
                request.write(chunk("a"))
                await asked.wait()
                request.write(DONE)
                request.finish()

            await world.add("a", script)
            running = await world.send(STREAM)
            world.state.begin_drain()
            refused = await world.ask(CHAT)
            assert (refused.status, refused.json["error"]["code"]) == (503, "draining")
            assert "retry-after" in refused.headers
            assert (await world.get("/ready")).status == 503
            asked.set()
            assert await running.read(1 << 20) == chunk("a") + DONE

    asyncio.run(main())


def test_a_bug_is_a_clean_500() -> None:
    async def main() -> None:
        async with World() as world:
            await world.add("a", answers(ANSWER))
            world.gateway._parts.proxy._dialects.clear()
            got = await world.ask(CHAT)
            assert (got.status, got.json["error"]["code"]) == (500, "internal_error")
            assert (await world.settled()).error == "internal_error"

    asyncio.run(main())


def test_a_half_closed_post_gets_its_answer() -> None:
    async def main() -> None:
        async with World() as world:
            arrived, answer = asyncio.Event(), asyncio.Event()

            async def script(worker: MockWorker, request: HttpRequest) -> None:
                arrived.set()
                await answer.wait()
                request.respond(200, [(b"content-type", b"application/json")], ANSWER)

            await world.add("a", script)
            reader, writer = await asyncio.open_connection("127.0.0.1", world.server.port)
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(CHAT) + CHAT
            )
            writer.write_eof()
            await arrived.wait()
            answer.set()
            async with asyncio.timeout(LONG_S):
                received = await reader.read()
            assert received.startswith(b"HTTP/1.1 200 OK\r\n")
            assert received.endswith(ANSWER)
            assert (await world.settled()).status == 200
            writer.close()

    asyncio.run(main())


def test_a_client_that_closed_cancels_its_request_before_the_answer_begins() -> None:
    async def main() -> None:
        async with World() as world:
            worker = await world.add("a", hangs())
            _reader, writer = await asyncio.open_connection("127.0.0.1", world.server.port)
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(CHAT) + CHAT
            )
            await until(lambda: worker.num_running == 1)
            writer.close()
            await until(lambda: worker.num_gone == 1)
            await world.settled()

    asyncio.run(main())


def test_a_request_that_was_not_served_uses_nothing_of_its_keys_tokens() -> None:
    async def main() -> None:
        settings = KeySettings(name="k", sha256=hashlib.sha256(b"secret").hexdigest(), tokens_per_minute=15)
        shown = [(b"authorization", b"Bearer secret")]
        async with World(keys=[settings], proxy=replace(PATIENT, retries=0)) as world:
            await world.add("a", in_turn(drops(), answers(b"{}", status=400), answers(ANSWER)))
            assert (await world.ask(CHAT, headers=shown)).status == 502
            assert (await world.ask(CHAT, headers=shown)).status == 400
            assert (await world.ask(CHAT, headers=shown)).status == 200
            assert (await world.ask(CHAT, headers=shown)).status == 429

    asyncio.run(main())


def test_a_request_whose_client_already_left_is_not_run() -> None:
    async def main() -> None:
        world = World()

        async def handle(request: HttpRequest) -> None:
            request.lose()  # with TLS, a client's close may arrive together with its request
            await world.gateway.handle(request)

        world.server = Server(handle, ServerLimits(), on_bad=world.gateway.count_bad_request, gate=world.gate)
        async with world:
            worker = await world.add("a", answers(ANSWER))
            _, writer = await asyncio.open_connection("127.0.0.1", world.server.port)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(CHAT))
            writer.write(CHAT)
            await until(lambda: b'status="499"' in world.metrics.render())
            assert worker.bodies == []
            assert world.ledger.totals() == NOTHING
            writer.close()

    asyncio.run(main())


def test_a_worker_reads_the_bytes_that_the_gateway_has_checked() -> None:
    """A worker would decompress or decode the body as these headers say, and see other fields than the gateway."""

    async def main() -> None:
        async with World() as world:
            worker = await world.add("a", answers(ANSWER))
            given = [(b"content-encoding", b"deflate"), (b"content-type", b"application/json; charset=utf-7")]
            assert (await world.ask({"model": "m"}, headers=given)).status == 200
            assert (await world.ask({"model": "m"})).status == 200
            for headers in worker.headers:
                assert "content-encoding" not in headers
                assert headers["content-type"] == "application/json"

    asyncio.run(main())

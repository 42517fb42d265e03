"""A whole gateway built from settings, with mock workers: limits, tenants, billing, traces, overload."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import socket
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mocks import JSON, MockWorker, Script
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from waiting import LONG_S, until

from stoker.gateway import gateway_server
from stoker.gateway.build import build_gateway
from stoker.gateway.config import load
from stoker.gateway.gateway_server import GatewayServer
from stoker.gateway.http import ClientLimits, ConnectionPool, HttpRequest, Origin

ADMIN = "an-admin-token-for-tests"
BODY = {"model": "m", "messages": [{"role": "user", "content": "Hello there"}]}


def serving(gate: asyncio.Event | None = None, prompt_tokens: int = 100, cached_tokens: int = 60) -> Script:
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}
    answer = json.dumps({"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage}).encode()
    models = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()

    async def script(worker: MockWorker, request: HttpRequest) -> None:
        if request.path == b"/v1/models":
            request.respond(200, JSON, models)
        elif request.path == b"/health":
            request.respond(200, JSON, b"{}")
        else:
            if gate is not None:
                await gate.wait()
            request.respond(200, JSON, answer)

    return script


@dataclass
class Built:
    gateway: GatewayServer
    pool: ConnectionPool
    workers: list[MockWorker]

    async def ask(
        self,
        path: str = "/v1/chat/completions",
        body: Any = BODY,
        key: str | None = None,
        method: str = "POST",
        **headers: str,
    ) -> tuple[int, dict[str, str], bytes]:
        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        if key is not None:
            pairs.append((b"authorization", f"Bearer {key}".encode()))
        data = b"" if method == "GET" else json.dumps(body).encode()
        answer = await self.pool.send(method.encode(), path.encode(), pairs, data, connect_s=LONG_S, head_s=LONG_S)
        return answer.status, {n.decode(): v.decode() for n, v in answer.headers}, await answer.read(1 << 24)

    async def get(self, path: str, key: str | None = ADMIN) -> Any:
        status, _, body = await self.ask(path, key=key, method="GET")
        assert status == 200, body
        return json.loads(body)


@asynccontextmanager
async def built(tmp_path: Path, settings: dict[str, Any], scripts: Sequence[Script]) -> AsyncIterator[Built]:
    workers = [MockWorker(script, f"w{number}") for number, script in enumerate(scripts)]
    for worker in workers:
        await worker.start()
    token = tmp_path / "admin"
    token.write_text(ADMIN)
    overrides = {
        "worker": [{"url": worker.url, "dialect": "openai"} for worker in workers],
        "admin_token_file": str(token),
        "log_requests": False,
        "proxy.connect_s": LONG_S,
        **settings,
    }
    gateway = build_gateway(load(None, overrides))
    listener = socket.create_server(("127.0.0.1", 0))
    await gateway.start(listener)
    await until(lambda: all(member.models for member in gateway.fleet.members()))
    pool = ConnectionPool(Origin("http", "127.0.0.1", listener.getsockname()[1]), ClientLimits())
    try:
        yield Built(gateway, pool, workers)
    finally:
        pool.close()
        await gateway.close()
        listener.close()
        for worker in workers:
            await worker.stop()


def key_of(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(f"sk-{name}".encode()).hexdigest(), **more}


def test_every_request_is_billed_once_to_its_tenant_and_all_books_agree(tmp_path: Path) -> None:
    async def main() -> None:
        settings = {
            "store": str(tmp_path / "usage.db"),
            "key": [key_of("alice", tenant="red"), key_of("bob", tenant="blue")],
            "price": [{"model": "m", "input": 1.0, "cached_input": 0.1, "output": 2.0}],
        }
        async with built(tmp_path, settings, [serving(), serving()]) as world:
            statuses = await asyncio.gather(
                *(world.ask(key="sk-alice" if number % 3 else "sk-bob") for number in range(60)),
                *(world.ask(key="sk-nobody") for _ in range(5)),
                *(world.ask(key="sk-alice", body={**BODY, "model": "unknown"}) for _ in range(5)),
            )
            assert sorted({status for status, _, _ in statuses}) == [200, 401, 404]
            await until(lambda: world.gateway.meter.pending == 0)
            usage = await world.get("/v1/usage?group_by=tenant")
            served = {line["tenant"]: line for line in usage["data"]}
            assert served["blue"]["prompt_tokens"] == 20 * 100
            assert served["red"]["cached_tokens"] == 40 * 60
            assert served["blue"]["cost"] == "0.0012"  # 20 x (40 + 60 x 0.1 + 7 x 2) millionths
            mine = await world.get("/v1/usage", key="sk-bob")
            assert mine["total"]["requests"] == 20
            status, _, text = await world.ask("/metrics", key=ADMIN, method="GET")
            assert status == 200
            assert b'stoker_gateway_prompt_tokens_total{model="m"} 6000' in text
            assert b'stoker_gateway_requests_total{endpoint="chat",status="401"} 5' in text
            assert (await world.get("/admin/ledger"))["reserved"]["requests"] == 0
            # The tenants' caches are separate, and clients' keys are not forwarded.
            seen = {header.get("authorization") for worker in world.workers for header in worker.headers}
            assert seen == {None}
        with closing(sqlite3.connect(tmp_path / "usage.db")) as connection:
            rows = connection.execute("SELECT COUNT(*), SUM(prompt_tokens) FROM usage WHERE status = 200").fetchone()
        assert rows == (60, 6000)

    asyncio.run(main())


def test_it_asks_for_as_many_files_as_its_connections_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(gateway_server, "allow_files", lambda wanted: asked.append(wanted) or wanted)

    async def main() -> None:
        async with built(tmp_path, {"listen.max_connections": 1000}, [serving()]):
            assert asked == [3024]

    asyncio.run(main())


def test_a_keys_limits_are_answered_with_429_and_a_time(tmp_path: Path) -> None:
    async def main() -> None:
        settings = {"key": [key_of("poor", requests_per_minute=3)]}
        async with built(tmp_path, settings, [serving()]) as world:
            answers = [await world.ask(key="sk-poor") for _ in range(5)]
            assert [status for status, _, _ in answers] == [200, 200, 200, 429, 429]
            assert 1 <= int(answers[-1][1]["retry-after"]) <= 20
            assert json.loads(answers[-1][2])["error"]["code"] == "rate_limited"

    asyncio.run(main())


def test_reject_if_busy_does_not_wait(tmp_path: Path) -> None:
    async def main() -> None:
        settings = {"admission.requests_per_worker": 1, "admission.queue_s": 10 * LONG_S}
        gate = asyncio.Event()
        async with built(tmp_path, settings, [serving(gate)]) as world:
            first = asyncio.create_task(world.ask())
            waiting = asyncio.create_task(world.ask())
            await until(lambda: world.workers[0].num_running == 1)
            by_header = await world.ask(x_reject_if_busy="1")
            by_body = await world.ask(body={**BODY, "rejectIfBusy": True})
            gate.set()
            for status, headers, body in (by_header, by_body):
                assert (status, json.loads(body)["error"]["code"]) == (503, "busy")
                assert int(headers["retry-after"]) >= 1
            assert [(await one)[0] for one in (first, waiting)] == [200, 200]
            assert all(b"rejectIfBusy" not in body for body in world.workers[0].bodies)

    asyncio.run(main())


def test_overload_keeps_to_the_places_and_refuses_the_rest_at_once(tmp_path: Path) -> None:
    """4 slots and a queue of 8: while no request ends, further requests are refused."""

    async def main() -> None:
        rules = {"admission.requests_per_worker": 4, "admission.queue_requests": 8, "admission.queue_s": 10 * LONG_S}
        gate = asyncio.Event()
        serves = serving(gate)
        num_running, most = 0, 0

        async def counts(worker: MockWorker, request: HttpRequest) -> None:
            nonlocal num_running, most
            is_chat = request.path.endswith(b"/completions")
            num_running += is_chat
            most = max(most, num_running)
            await serves(worker, request)
            num_running -= is_chat

        async with built(tmp_path, rules, [counts]) as world:
            asked = [asyncio.create_task(world.ask()) for _ in range(40)]
            await until(lambda: num_running == 4 and sum(one.done() for one in asked) == 28)
            for status, headers, _ in (one.result() for one in asked if one.done()):
                assert status == 503
                assert "retry-after" in headers
            gate.set()
            assert sorted(status for status, _, _ in await asyncio.gather(*asked)) == [200] * 12 + [503] * 28
            assert most == 4
            assert (await world.get("/admin/ledger"))["admitted"]["requests"] == 0

    asyncio.run(main())


def test_workers_come_and_go_while_it_runs(tmp_path: Path) -> None:
    async def main() -> None:
        async with built(tmp_path, {}, [serving()]) as world:
            other = MockWorker(serving(), "late")
            await other.start()
            body = {"url": other.url, "dialect": "openai"}
            status, _, _ = await world.ask("/admin/workers", body, ADMIN)
            assert status == 200
            first = str(world.workers[0].url).removeprefix("http://")
            await until(lambda: all(member.models for member in world.gateway.fleet.members()))
            assert (await world.ask(f"/admin/drain?worker={first}", {}, ADMIN))[0] == 200
            before = len(world.workers[0].paths)
            assert [(await world.ask())[0] for _ in range(5)] == [200] * 5
            chats = [path for path in world.workers[0].paths[before:] if "chat" in path]
            assert chats == []
            name = other.url.removeprefix("http://")
            assert (await world.ask(f"/admin/workers?worker={name}", {}, ADMIN, "DELETE"))[0] == 200
            assert (await world.ask())[0] == 503
            assert (await world.ask(f"/admin/undrain?worker={first}", {}, ADMIN))[0] == 200
            assert (await world.ask())[0] == 200
            bad = await world.ask("/admin/workers", {"url": "http://x", "dialect": "klingon"}, ADMIN)
            assert bad[0] == 400
            await other.stop()

    asyncio.run(main())


def test_a_gateway_that_announced_its_drain_still_serves_but_keeps_no_connection(tmp_path: Path) -> None:
    async def main() -> None:
        async with built(tmp_path, {}, [serving()]) as world:
            assert "connection" not in (await world.ask())[1]
            world.gateway.announce_drain()
            assert (await world.ask("/ready", method="GET"))[0] == 503
            status, headers, _ = await world.ask()
            assert (status, headers["connection"]) == (200, "close")
            world.gateway.begin_drain()
            assert (await world.ask())[0] == 503

    asyncio.run(main())


def test_draining_refuses_the_new_and_finishes_the_old(tmp_path: Path) -> None:
    async def main() -> None:
        gate = asyncio.Event()
        async with built(tmp_path, {}, [serving(gate)]) as world:
            running = asyncio.create_task(world.ask())
            await until(lambda: world.gateway.num_running == 1)
            world.gateway.begin_drain()
            status, _, body = await world.ask()
            assert (status, json.loads(body)["error"]["code"]) == (503, "draining")
            assert (await world.ask("/ready", method="GET"))[0] == 503
            gate.set()
            await asyncio.wait_for(world.gateway.wait_idle(), LONG_S)
            assert (await running)[0] == 200

    asyncio.run(main())


def test_one_trace_a_request_from_the_client_through_the_gateway_to_the_worker(tmp_path: Path) -> None:
    async def main() -> None:
        sink = MockWorker(_takes_traces, "collector")
        await sink.start()
        trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
        settings = {"tracing.otlp_endpoint": f"{sink.url}/v1/traces"}
        async with built(tmp_path, settings, [serving()]) as world:
            assert (await world.ask(traceparent=f"00-{trace_id}-{parent}-01"))[0] == 200
            chat = world.workers[0].paths.index("/v1/chat/completions")
            passed_on = world.workers[0].headers[chat]["traceparent"].split("-")
        spans = {span.name: span for body in sink.bodies for span in _spans(body)}
        assert set(spans) == {"gateway.request", "admission", "route", "leg.decode"}
        assert {span.trace_id.hex() for span in spans.values()} == {trace_id}
        root = spans.pop("gateway.request")
        assert root.parent_span_id.hex() == parent
        assert {span.parent_span_id for span in spans.values()} == {root.span_id}
        assert passed_on == ["00", trace_id, spans["leg.decode"].span_id.hex(), "01"]
        await sink.stop()

    asyncio.run(main())


async def _takes_traces(worker: MockWorker, request: HttpRequest) -> None:
    request.respond(200, [(b"content-type", b"application/x-protobuf")], b"")


def _spans(body: bytes) -> list[Any]:
    data = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
    message = ExportTraceServiceRequest.FromString(data)
    return [span for resource in message.resource_spans for scope in resource.scope_spans for span in scope.spans]


def test_metrics_need_a_token_where_keys_are_configured(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "metrics").write_text("a-metrics-token-for-tests")
        settings = {"store": "none", "key": [key_of("alice")], "metrics_token_file": str(tmp_path / "metrics")}
        async with built(tmp_path, settings, [serving()]) as world:
            for token, expected in ((None, 401), ("sk-alice", 401), (ADMIN, 200), ("a-metrics-token-for-tests", 200)):
                status, headers, body = await world.ask("/metrics", key=token, method="GET")
                assert status == expected, token
                if status == 401:
                    assert headers["www-authenticate"] == "Bearer"
                    assert "--metrics-token-file" in json.loads(body)["error"]["message"]
            # The metrics token opens nothing else.
            assert (await world.ask("/admin/fleet", key="a-metrics-token-for-tests", method="GET"))[0] == 401
        async with built(tmp_path, {"store": "none"}, [serving()]) as world:
            assert (await world.ask("/metrics", method="GET"))[0] == 200

    asyncio.run(main())

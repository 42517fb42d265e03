"""The dashboard's data over HTTP: behind the admin token, bounded, and streamed once per second."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from mocks import DONE, chunk, streams, usage_chunk
from waiting import LONG_S, until
from world import World

from stoker.base.ids import WorkerId
from stoker.fleet.spec import LoadReport
from stoker.gateway.admission.api_keys import AdminToken
from stoker.gateway.api.endpoint import EndpointRequest
from stoker.gateway.http import WorkerResponse
from stoker.gateway.insight.insight_endpoint import INSIGHT_PATHS, InsightEndpoint
from stoker.gateway.insight.kv_pages import KvPages
from stoker.gateway.insight.live_stream import LiveStream
from stoker.gateway.processes import RedirectedRequest

TOKEN = "the-admin-token-of-tests"
AUTH = [(b"authorization", b"Bearer " + TOKEN.encode())]
PAGE = b"""# HELP stoker_kv_blocks x
stoker_kv_blocks 100
stoker_kv_blocks_cached 40
stoker_kv_tier_blocks{tier="host"} 10
stoker_kv_tier_used_bytes{tier="host"} 10240
stoker_kv_tier_capacity_bytes{tier="host"} 102400
"""
IMPOSSIBLE = PAGE.replace(b"102400", b"inf").replace(b"40", b"nan").replace(b"100\n", b"-5\n")
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "user": "s1"}


class Insight:
    """A gateway with one worker, and the dashboard's endpoints."""

    def __init__(self, page: bytes | None = PAGE) -> None:
        self.world = World()
        self.page = page
        self.num_reads = 0
        token = AdminToken([TOKEN])
        kv = KvPages(self.world.fleet, self.world.insight.reuse, self.read_page, self.world.clock.now)
        pages = InsightEndpoint(token, self.world.insight, kv)

        async def read_now(viewer: EndpointRequest) -> bytes | None:
            return (await pages.answer(RedirectedRequest(viewer, b"/admin/now"))).body

        self.live = LiveStream(token, self.world.insight, read_now)
        self.world.change(insight_pages=pages, live=self.live)

    async def read_page(self, worker_id: WorkerId) -> bytes | None:
        self.num_reads += 1
        return self.page

    async def send(self, path: str, method: bytes = b"GET", headers: Any = AUTH) -> WorkerResponse:
        return await self.world.client.send(method, path.encode(), headers, b"", connect_s=LONG_S, head_s=LONG_S)

    async def get(self, path: str) -> Any:
        answer = await self.send(path)
        body = await answer.read(1 << 24)
        assert answer.status == 200, body
        return json.loads(body)


def test_every_path_needs_the_token_and_get() -> None:
    async def main() -> None:
        insight = Insight()
        async with insight.world:
            for path in [*(one.decode() for one in INSIGHT_PATHS), "/admin/stream"]:
                for headers in ([], [(b"authorization", b"Bearer wrong")]):
                    assert (await insight.send(path, headers=headers)).status == 401
                assert (await insight.send(path, b"POST")).status == 405

    asyncio.run(main())


@pytest.mark.parametrize(
    ("query", "field"),
    [("step=2", "step"), ("step=x", "step"), ("n=0", "n"), ("n=601", "n"), ("step=300&n=865", "n"), ("n=%C2%B2", "n")],
)
def test_wrong_queries_name_the_field(query: str, field: str) -> None:
    async def main() -> None:
        insight = Insight()
        async with insight.world:
            answer = await insight.send(f"/admin/series?{query}")
            assert answer.status == 400
            assert json.loads(await answer.read(1 << 20))["error"]["param"] == field

    asyncio.run(main())


def test_a_request_is_shown_with_its_route_and_its_gaps() -> None:
    async def main() -> None:
        insight = Insight()
        world = insight.world
        async with world:
            pieces = [chunk(text) for text in "abcd"]
            await world.add("w", streams(*pieces, usage_chunk(10, 4, 4), DONE))
            answer = await world.ask(CHAT, headers=[(b"x-request-id", b"mine")])
            assert answer.status == 200
            await world.settled()
            world.insight.tick(1000.0)
            [shown] = (await insight.get("/admin/requests?n=5"))["requests"]
            assert (shown["x_request_id"], shown["cached_tokens"], shown["worker"]) == ("mine", 4, "w")
            assert len(shown["parts_ms"]) == 5
            one = await insight.get("/admin/requests?request=mine")
            assert [candidate["worker"] for candidate in one["candidates"]] == ["w"]
            assert (await insight.send("/admin/requests?request=other")).status == 404
            [session] = (await insight.get("/admin/sessions"))["sessions"]
            assert session["session"] == "default:s1"
            now = await insight.get("/admin/now")
            assert now["values"]["hit_ratio"] == 0.4
            assert world.metrics.itl_s.cumulative()[-1] >= 1
            series = await insight.get("/admin/series?step=10&n=2")
            assert len(series["times_s"]) == 2
            assert series["columns"]["requests_per_s"][-1] == 0.1

    asyncio.run(main())


@pytest.mark.parametrize(
    "page", [PAGE, None, b"stoker_kv_blocks many\n\xff", PAGE.replace(b" 10", b" 1e308"), IMPOSSIBLE]
)
def test_the_kv_page_has_the_tiers_of_workers_that_answer(page: bytes | None) -> None:
    async def main() -> None:
        insight = Insight(page)
        world = insight.world
        async with world:
            await world.add("w", streams(DONE), dialect="stoker")
            await world.add("v", streams(DONE), dialect="openai")
            world.fleet.saw_report(WorkerId("w"), LoadReport(num_blocks=100, block_tokens=16), world.clock.now())
            first = await insight.get("/admin/kv")
            assert await insight.get("/admin/kv") == first
            assert insight.num_reads == 1, "the page of the Stoker worker, once"
            worker = {one["worker"]: one for one in first["workers"]}["w"]
            assert worker["answers"] is (page is not None)
            if page is PAGE:
                assert worker["tiers"]["host"]["capacity_bytes"] == 102_400
                assert worker["capacity_tokens"] == (100 + 100) * 16
                assert first["bytes_per_token"] == 64
            world.clock.advance(6.0)
            await insight.get("/admin/kv")
            assert insight.num_reads == 2

    asyncio.run(main())


def test_a_stream_has_one_event_per_tick_and_ends_with_its_viewer() -> None:
    async def main() -> None:
        insight = Insight()
        async with insight.world:
            insight.live.start()
            try:
                answer = await insight.send("/admin/stream")
                assert answer.header(b"content-type") == b"text/event-stream"
                seen: list[bytes] = []
                reading = asyncio.create_task(answer.relay(seen.append))
                await until(lambda: b"".join(seen).count(b"data: ") >= 3)
                first = json.loads(b"".join(seen).split(b"\n\n")[0].removeprefix(b"data: "))
                assert first["bottleneck"].startswith("No worker is connected")
                assert len(insight.live._viewers) == 1
                answer.abort()
                await asyncio.gather(reading, return_exceptions=True)
                await until(lambda: not insight.live._viewers)
            finally:
                await insight.live.close()

    asyncio.run(main())


def test_the_number_of_streams_is_limited() -> None:
    async def main() -> None:
        insight = Insight()
        async with insight.world:
            insight.live._viewers = [None] * 32  # type: ignore[list-item]
            answer = await insight.send("/admin/stream")
            assert answer.status == 503
            assert json.loads(await answer.read(1 << 20))["error"]["code"] == "too_many_streams"

    asyncio.run(main())

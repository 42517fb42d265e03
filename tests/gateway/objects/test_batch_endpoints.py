"""Batches of the endpoints besides chat, the tokens that a batch used, and what its lines hold while they wait."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mocks import JSON, MockWorker
from response_worker import FakeResponses, Keys, stored_world
from test_batches import CHAT, FakeChat, begin, content, ended, line
from waiting import until

from stoker.gateway.http import HttpRequest
from stoker.gateway.key_settings import KeySettings
from stoker.gateway.objects.line_usage import LineUsage, usage_of

ANSWERS: dict[str, Any] = {
    "/v1/completions": {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14},
    "/v1/embeddings": {"prompt_tokens": 10, "total_tokens": 10},
    "/v1/rerank": {"total_tokens": 10},
}


@dataclass
class FakeEngine(FakeResponses):
    """Answers every path with its usage. Requests for embeddings wait for `gate`."""

    gate: asyncio.Event | None = None

    async def __call__(self, worker: MockWorker, request: HttpRequest) -> None:
        path = request.path.decode()
        if self.gate is not None and path == "/v1/embeddings":
            await self.gate.wait()
        answer = {"object": "x", "choices": [], "data": [], "results": [], "usage": ANSWERS[path]}
        request.respond(200, JSON, json.dumps(answer).encode())


def lines(endpoint: str, count: int = 3) -> list[str]:
    body = {"model": "m", "prompt": "p", "input": "i", "query": "q", "documents": ["d"]}
    return [json.dumps({"custom_id": f"{i}", "method": "POST", "url": endpoint, "body": body}) for i in range(count)]


@pytest.mark.parametrize("endpoint", ANSWERS)
async def test_a_batch_of_another_endpoint_runs_and_counts_its_tokens(tmp_path: Path, endpoint: str) -> None:
    async with stored_world(tmp_path / "s.db", FakeEngine()) as world:
        batch = await ended(world, await begin(world, lines(endpoint), endpoint=endpoint))
        assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}, batch
        tokens = 12 if endpoint == "/v1/completions" else 0
        assert batch["usage"] == {
            "input_tokens": 30,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 30 + tokens,
        }
        assert [one["custom_id"] for one in await content(world, batch["output_file_id"])] == ["0", "1", "2"]
        assert all("service_tier" not in sent for sent in world.workers["w"].jsons if "query" in sent)
        assert {row.status for row in world.rows.rows} == {200}


async def test_interactive_requests_preempt_a_batch_of_embeddings(tmp_path: Path) -> None:
    script = FakeEngine(gate=asyncio.Event())
    async with stored_world(tmp_path / "s.db", script) as world:
        batch_id = await begin(world, lines("/v1/embeddings"), endpoint="/v1/embeddings")
        await until(lambda: world.workers["w"].num_running == 3)
        assert (await world.ask({"model": "m", "query": "q", "documents": ["d"]}, "/v1/rerank")).status == 200
        assert world.flex.num_preempted == 3
        await until(lambda: world.workers["w"].num_running == 0)
        assert script.gate is not None
        script.gate.set()
        world.clock.advance(1.0)
        assert (await ended(world, batch_id))["request_counts"]["completed"] == 3
        assert world.flex.num_running == world.admission.num_in_flight == 0


async def test_lines_that_wait_leave_the_key_its_concurrent_requests(tmp_path: Path) -> None:
    keys = Keys.of("one")
    [key] = keys.settings
    keys.settings = [KeySettings(key.name, key.sha256, key.tenant, concurrency=1)]
    async with stored_world(tmp_path / "s.db", FakeChat(), keys=keys) as world:
        mine = keys.header("one")
        limiter = world.gateway._parts.keys.caller(key.name).limiter
        lane = world.flex.interactive_began("m")  # of another client: the fleet is not idle
        batch_id = await begin(world, [line(f"id-{i}", f"line {i}") for i in range(2)], mine)
        await until(lambda: world.flex.num_waiting > 0)
        assert limiter.num_open == 0
        body = {"model": "m", "messages": [{"role": "user", "content": "now"}]}
        assert (await world.ask(body, CHAT, mine)).status == 200
        world.flex.interactive_ended(lane)
        world.clock.advance(1.0)
        batch = await ended(world, batch_id, headers=mine)
        assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
        assert limiter.num_open == 0


async def test_a_defect_does_not_stop_the_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected error in the loop, in a whole batch, and in a line: each is counted, and the others go on."""
    monkeypatch.setattr("stoker.base.long_task._PAUSE_S", (0.01, 0.01))
    monkeypatch.setattr("stoker.gateway.objects.batch_runner._DEFECT_S", 0.01)
    monkeypatch.setattr("stoker.gateway.objects.batch_runner._RETRY_S", 0.01)
    async with stored_world(tmp_path / "s.db", FakeChat()) as world:
        runner = world.gateway._parts.objects.batches.runner
        real_look, real_read, real_run = runner._look, runner._files.read_input, runner._run
        assert real_run is not None
        failures = {"batches": 2, "batch_job": 2}

        def fails(name: str) -> None:
            failures[name] -= 1
            if failures[name] >= 0:
                raise KeyError(name)

        async def look() -> None:
            fails("batches")
            await real_look()

        async def read(batch: Any) -> None:
            fails("batch_job")
            await real_read(batch)

        async def run(request: HttpRequest) -> None:
            if b"line 1" in request.body:
                raise KeyError("batch_line")
            await real_run(request)

        runner._look, runner._files.read_input, runner._run = look, read, run
        batch = await ended(world, await begin(world, [line(f"id-{i}", f"line {i}") for i in range(3)]))
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        [failed] = await content(world, batch["error_file_id"])
        assert (failed["custom_id"], failed["response"]["status_code"]) == ("id-1", 500)
        assert runner._errors.counts == {"batches": 2, "batch_job": 2, "batch_line": 3}


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}, (9, 4, 2, 0)),
        ({"input_tokens": 9, "output_tokens": 5, "output_tokens_details": {"reasoning_tokens": 3}}, (9, 0, 5, 3)),
        ({"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 2}, (9, 4, 2, 0)),
        ({"total_tokens": 7}, (7, 0, 0, 0)),
        ({"prompt_tokens": -1, "completion_tokens": "x", "prompt_tokens_details": 3}, (0, 0, 0, 0)),
        ({"prompt_tokens": 1 << 80, "completion_tokens": True}, (0, 0, 0, 0)),
        ({"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 9}}, (1, 1, 0, 0)),
        ([], (0, 0, 0, 0)),
        (None, (0, 0, 0, 0)),
    ],
)
def test_usage_is_read_from_every_api(usage: Any, expected: tuple[int, int, int, int]) -> None:
    assert usage_of(json.dumps({"usage": usage}).encode()) == LineUsage(*expected)
    assert usage_of(b"not json") == LineUsage()

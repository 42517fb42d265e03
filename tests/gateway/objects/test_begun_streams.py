"""A background stream whose gateway died is continued by another one, after the last event that is stored."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from mocks import JSON, SSE, MockWorker
from response_worker import FakeResponses, call, events_of, stored_world
from test_stored_responses import PATH, create, wait_status
from waiting import until
from world import World

from stoker.gateway.http import HttpRequest

LETTERS = "abcdefgh"


@dataclass
class NotingWorker(FakeResponses):
    """Streams one letter per token, with notes as a Stoker worker writes them. It stops after `stop` letters."""

    stop: int | None = 3
    busy: int = 0  # how many of the next resumed requests are refused
    resumed: list[Any] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)

    async def __call__(self, worker: MockWorker, request: HttpRequest) -> None:
        body = json.loads(request.body)
        resume = body.get("resume")
        self.seeds.append(body["seed"])
        self.names.append(request.header(b"x-request-id") or b"")
        if resume is not None and self.busy:
            self.busy -= 1
            error = {"error": {"message": "no", "type": "x", "param": None, "code": "overloaded"}}
            request.respond(503, JSON, json.dumps(error).encode())
            return
        if resume is not None:
            self.resumed.append(resume)
        known = 0 if resume is None else len(resume["choices"][0]["token_ids"])
        skipped = 0 if resume is None else resume["events"]
        request.start(200, SSE)
        number, notes = 0, ":u 10 4 1 5\n"

        def send(kind: str, notes: str = "", **fields: Any) -> None:
            nonlocal number
            if number >= skipped:
                data = json.dumps({"type": kind, "sequence_number": number, **fields}, separators=(",", ":"))
                request.write(f"{notes}event: {kind}\ndata: {data}\n\n".encode())
            number += 1

        response = {"id": "resp_worker", "object": "response", "created_at": 1, "model": "m", "status": "in_progress"}
        send("response.created", response=response)
        send("response.in_progress", response=response)
        for i, letter in enumerate(LETTERS):
            if resume is None and i == self.stop:
                await asyncio.Event().wait()
            tokens = f"{notes}:t 0 {100 + i}\n" if i >= known else ""
            notes = notes if i < known else ""
            send("response.output_text.delta", tokens, delta=letter, item_id="msg_1")
        usage = {"input_tokens": 10, "output_tokens": len(LETTERS), "total_tokens": 10 + len(LETTERS)}
        send("response.completed", ":f 0\n", response=response | {"status": "completed", "output": [], "usage": usage})
        request.finish()


async def begin_and_die(dying: World, script: NotingWorker, num_stored: int) -> str:
    """Begin a stream, and stop the gateway as kill -9 does once its events are stored."""
    asyncio.get_running_loop().create_task(create(dying, {"input": "a", "background": True, "stream": True}))
    await until(lambda: bool(script.seeds))
    runs = dying.gateway._parts.objects.responses.runs
    [response_id] = runs._tasks
    for _ in range(1500):
        got = (await call(dying, "GET", f"{PATH}/{response_id}")).json
        rows = await runs._store.read(
            lambda reader: list(reader.execute("SELECT MAX(last_number) FROM response_events"))
        )
        if rows == [(num_stored - 1,)]:
            break
        await asyncio.sleep(0.02)
    assert got["status"] == "in_progress"
    runs._keeper.cancel()
    runs._tasks.clear()
    runs._store.write = _never
    return str(response_id)


async def _never(*_: Any, **__: Any) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize(("stop", "busy"), [(3, 0), (3, 2), (0, 0)])
async def test_the_stream_goes_on_after_the_last_stored_event(tmp_path: Path, stop: int, busy: int) -> None:
    """With `stop` 0, only events from before the first token are stored, and the response begins again."""
    script = NotingWorker(stop=stop, busy=busy)
    store = tmp_path / "s.db"
    async with (
        stored_world(store, script, dialect="stoker") as survivor,
        stored_world(store, script, dialect="stoker") as dying,
    ):
        response_id = await begin_and_die(dying, script, num_stored=2 + stop)
        script.stop = None
        done = await wait_status(survivor, response_id, "completed")
        events = events_of((await call(survivor, "GET", f"{PATH}/{response_id}?stream=true")).body)
        assert [event["sequence_number"] for event in events] == list(range(len(LETTERS) + 3))
        assert "".join(event.get("delta", "") for event in events) == LETTERS
        assert {event["response"]["created_at"] for event in events if "response" in event} == {done["created_at"]}
        rest = events_of((await call(survivor, "GET", f"{PATH}/{response_id}?stream=true&starting_after=4")).body)
        assert rest == events[5:]
        assert len(set(script.seeds)) == 1
        assert set(script.names) == {response_id.encode()}
        if stop:
            token_ids = [100 + i for i in range(stop)]
            assert script.resumed == [
                {"created": 1, "choices": [{"token_ids": token_ids, "finished": False}], "events": 2 + stop}
            ]
        await until(lambda: any(row.status == 200 for row in survivor.rows.rows))
        [row] = [row for row in survivor.rows.rows if row.status == 200]
        assert row.completion_tokens == len(LETTERS) - stop  # the first gateway has billed the others
        assert sum(row.completion_tokens for row in survivor.rows.rows if row.status != 200) == 0
        assert {row.request_id.partition("/")[0] for row in survivor.rows.rows} == {
            response_id
        }  # one bill for the prompt


async def test_a_stream_that_no_worker_can_continue_ends_within_a_lease(tmp_path: Path) -> None:
    script = NotingWorker(stop=2)
    store = tmp_path / "s.db"
    async with (
        stored_world(store, script, dialect="stoker") as survivor,
        stored_world(store, script, dialect="stoker") as dying,
    ):
        response_id = await begin_and_die(dying, script, num_stored=4)
        threads = survivor.gateway._parts.objects._store
        await threads.write(lambda changes: changes.execute("UPDATE response_events SET notes = NULL"))
        failed = await wait_status(survivor, response_id, "failed")
        assert "has stopped" in failed["error"]["message"]
        events = events_of((await call(survivor, "GET", f"{PATH}/{response_id}?stream=true")).body)
        assert [event["sequence_number"] for event in events] == list(range(5))
        assert events[-1]["type"] == "response.failed"

"""Files and batches: each line once in the output, whatever dies, and only while nothing interactive runs."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from mocks import JSON, MockWorker
from response_worker import FakeResponses, Keys, call, stored_world
from waiting import LONG_S, until
from world import Got, World, _got

from stoker.base.errors import InvalidRequest
from stoker.gateway.http import HttpRequest, ResponseLost
from stoker.gateway.objects import file_table
from stoker.gateway.objects.file_table import PIECE_BYTES
from stoker.gateway.objects.multipart import read_form

BOUNDARY = b"x-boundary"
CHAT = "/v1/chat/completions"


@dataclass
class FakeChat(FakeResponses):
    """Answers a chat request with its own text. `statuses` are those of the next requests."""

    statuses: list[int] = field(default_factory=list)
    gate: asyncio.Event | None = None  # answers wait for it
    answered: Counter[str] = field(default_factory=Counter)

    async def __call__(self, worker: MockWorker, request: HttpRequest) -> None:
        body = json.loads(request.body)
        text = body["messages"][-1]["content"]
        if self.gate is not None and text.startswith("line"):
            await self.gate.wait()
        status = self.statuses.pop(0) if self.statuses and text.startswith("line") else 200
        if text == "bad":
            status = 400
        if status != 200:
            error = {"error": {"message": "no", "type": "x", "param": None, "code": "x"}}
            request.respond(status, JSON, json.dumps(error).encode())
            return
        self.answered[text] += 1
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        choice = {"index": 0, "message": {"role": "assistant", "content": f"<{text}>"}, "finish_reason": "stop"}
        answer = {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }
        request.respond(200, JSON, json.dumps(answer).encode())


def line(custom_id: str, text: str, **changes: Any) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "stream": True}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body} | changes)


def form(data: bytes, purpose: str = "batch") -> bytes:
    parts = [
        b'Content-Disposition: form-data; name="purpose"\r\n\r\n' + purpose.encode(),
        b'Content-Disposition: form-data; name="file"; filename="in.jsonl"\r\nContent-Type: x/y\r\n\r\n' + data,
    ]
    return b"".join(b"--" + BOUNDARY + b"\r\n" + part + b"\r\n" for part in parts) + b"--" + BOUNDARY + b"--\r\n"


async def send_form(world: World, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> Got:
    given = [(b"content-type", b"multipart/form-data; boundary=" + BOUNDARY), *headers]
    return await _got(await world.client.send(b"POST", b"/v1/files", given, body, connect_s=LONG_S, head_s=LONG_S))


async def upload(world: World, lines: Sequence[str], headers: Sequence[tuple[bytes, bytes]] = ()) -> str:
    got = await send_form(world, form("\n".join(lines).encode()), headers)
    assert got.status == 200, got.body
    return str(got.json["id"])


async def begin(world: World, lines: Sequence[str], headers: Sequence[tuple[bytes, bytes]] = (), **more: Any) -> str:
    body = {"input_file_id": await upload(world, lines, headers), "endpoint": CHAT, "completion_window": "24h"} | more
    got = await call(world, "POST", "/v1/batches", body, headers)
    assert got.status == 200, got.body
    assert got.json["status"] == "validating"
    return str(got.json["id"])


async def ended(world: World, batch_id: str, *statuses: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> Any:
    for _ in range(800):
        got = (await call(world, "GET", f"/v1/batches/{batch_id}", headers=headers)).json
        if got["status"] in (statuses or ("completed", "failed", "expired", "cancelled")):
            return got
        await asyncio.sleep(0.02)
    raise AssertionError(got)


async def content(world: World, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    got = await call(world, "GET", f"/v1/files/{file_id}/content")
    assert got.status == 200
    return [json.loads(one) for one in got.body.splitlines()]


async def test_each_line_is_once_in_the_output(tmp_path: Path) -> None:
    script = FakeChat(statuses=[503, 429, 502, 200, 503])
    async with stored_world(tmp_path / "s.db", script) as world:
        lines = [line(f"id-{i}", f"line {i}") for i in range(300)]
        lines.insert(7, line("id-bad", "bad"))
        batch = await ended(world, await begin(world, [*lines, ""], metadata={"a": "b"}))
        assert batch["status"] == "completed", batch
        assert batch["request_counts"] == {"total": 301, "completed": 300, "failed": 1}
        assert batch["metadata"] == {"a": "b"}
        assert (batch["usage"]["input_tokens"], batch["usage"]["output_tokens"]) == (900, 600)  # each line once
        output = await content(world, batch["output_file_id"])
        assert [one["custom_id"] for one in output] == [f"id-{i}" for i in range(300)]
        for i, one in enumerate(output):
            assert one["response"]["status_code"] == 200
            assert one["response"]["body"]["choices"][0]["message"]["content"] == f"<line {i}>"
        assert len({one["id"] for one in output}) == 300
        [failed] = await content(world, batch["error_file_id"])
        assert (failed["custom_id"], failed["response"]["status_code"]) == ("id-bad", 400)
        assert set(script.answered.values()) == {1}
        sent = world.workers["w"].jsons[0]
        assert (sent["stream"], sent.get("priority", None)) == (False, None)  # a foreign worker
        await until(lambda: sum(row.status == 200 for row in world.rows.rows) == 300)  # each is billed
        listed = (await call(world, "GET", "/v1/files?purpose=batch_output")).json["data"]
        assert {one["id"] for one in listed} == {batch["output_file_id"], batch["error_file_id"]}
        assert (await call(world, "GET", "/v1/batches")).json["data"][0]["id"] == batch["id"]
        left = world.gateway._parts.objects._store
        for _ in range(200):  # the lines are deleted after the batch has ended
            rows = await left.read(lambda reader: list(reader.execute("SELECT COUNT(*) FROM batch_lines")))
            if rows == [(0,)]:
                break
            await asyncio.sleep(0.02)
        assert rows == [(0,)]


async def test_bad_lines_are_reported_by_line(tmp_path: Path) -> None:
    async with stored_world(tmp_path / "s.db", FakeChat()) as world:
        lines = [
            line("a", "line"),
            "{not json",
            line("a", "line"),
            line("b", "line", method="GET"),
            line("c", "line", url="/v1/embeddings"),
            "",
            json.dumps({"custom_id": "d", "method": "POST", "url": CHAT}),
            line("", "line"),
            json.dumps([1]),
            line("e", "line", body=5),
            line("f", "line", body={str(number): 1 for number in range(60_000)}),
        ]
        batch = await ended(world, await begin(world, lines))
        assert batch["status"] == "failed"
        errors = batch["errors"]["data"]
        assert [(error["line"], error["code"]) for error in errors] == [
            (2, "invalid_json_line"),
            (3, "duplicate_custom_id"),
            (4, "invalid_method"),
            (5, "invalid_url"),
            (7, "invalid_line"),
            (8, "invalid_custom_id"),
            (9, "invalid_line"),
            (10, "invalid_line"),
            (11, "invalid_line"),
        ]
        assert "60000 fields" in errors[-1]["message"]
        assert world.workers["w"].bodies == []
        empty = await ended(world, await begin(world, ["", " "]))
        assert empty["errors"]["data"][0]["code"] == "empty_file"
        binary = await send_form(world, form(b"\0\xff\n" * 1000))
        body = {"input_file_id": binary.json["id"], "endpoint": CHAT, "completion_window": "24h"}
        hopeless = await ended(world, (await call(world, "POST", "/v1/batches", body)).json["id"])
        assert len(hopeless["errors"]["data"]) == 100


async def test_another_tenant_sees_neither_files_nor_batches(tmp_path: Path) -> None:
    keys = Keys.of("one", "two")
    async with stored_world(tmp_path / "s.db", FakeChat(), keys=keys) as world:
        mine, other = keys.header("one"), keys.header("two")
        file_id = await upload(world, [line("a", "line")], mine)
        batch_id = await begin(world, [line("a", "line")], mine)
        for method, path in (
            ("GET", f"/v1/files/{file_id}"),
            ("GET", f"/v1/files/{file_id}/content"),
            ("DELETE", f"/v1/files/{file_id}"),
            ("GET", f"/v1/batches/{batch_id}"),
            ("POST", f"/v1/batches/{batch_id}/cancel"),
        ):
            assert (await call(world, method, path, headers=other)).status == 404
            assert (await call(world, method, path)).status == 401
        for path in ("/v1/files", "/v1/batches"):
            assert (await call(world, "GET", path, headers=other)).json["data"] == []
            assert (await call(world, "GET", path)).status == 401
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        assert (await call(world, "POST", "/v1/batches", body, other)).status == 400
        assert (await call(world, "POST", "/v1/batches", body)).status == 401
        assert (await call(world, "GET", f"/v1/files/{file_id}/content", headers=mine)).body == line(
            "a", "line"
        ).encode()


async def test_a_cancelled_batch_keeps_what_it_has(tmp_path: Path) -> None:
    script = FakeChat()
    async with stored_world(tmp_path / "s.db", script) as world:
        script.gate = asyncio.Event()
        batch_id = await begin(world, [line(f"id-{i}", f"line {i}") for i in range(20)])
        await until(lambda: world.workers["w"].num_running > 0)
        assert (await call(world, "POST", f"/v1/batches/{batch_id}/cancel")).json["status"] == "cancelling"
        batch = await ended(world, batch_id)
        assert batch["status"] == "cancelled"
        await until(lambda: world.workers["w"].num_running == 0)  # what ran was stopped
        errors = await content(world, batch["error_file_id"])
        assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
        assert [one["custom_id"] for one in errors] == [f"id-{i}" for i in range(20)]
        assert (await call(world, "POST", f"/v1/batches/{batch_id}/cancel")).json["status"] == "cancelled"


async def test_a_batch_that_is_late_expires(tmp_path: Path) -> None:
    script = FakeChat(gate=asyncio.Event())
    async with stored_world(tmp_path / "s.db", script) as world:
        runner = world.gateway._parts.objects.batches.runner
        now_s = runner._unix_time()
        batch_id = await begin(world, [line(f"id-{i}", f"line {i}") for i in range(20)], completion_window="1h")
        await until(lambda: world.workers["w"].num_running > 0)
        runner._unix_time = runner._files._unix_time = lambda: now_s + 3601
        batch = await ended(world, batch_id)
        assert batch["status"] == "expired"
        errors = await content(world, batch["error_file_id"])
        assert {one["error"]["code"] for one in errors} == {"batch_expired"}
        assert len(errors) == 20


async def test_lines_of_a_gateway_that_died_run_elsewhere(tmp_path: Path) -> None:
    script = FakeChat(gate=asyncio.Event())
    async with stored_world(tmp_path / "s.db", script) as dying:
        batch_id = await begin(dying, [line(f"id-{i}", f"line {i}") for i in range(40)])
        await until(lambda: dying.workers["w"].num_running > 0)
        runner = dying.gateway._parts.objects.batches.runner
        runner._worker.cancel()  # dead: nothing is renewed or written any more
        runner._store.write = _never
        assert script.gate is not None
        script.gate.set()
        async with stored_world(tmp_path / "s.db", script) as survivor:
            batch = await ended(survivor, batch_id)
            assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
            output = await content(survivor, batch["output_file_id"])
            assert [one["custom_id"] for one in output] == [f"id-{i}" for i in range(40)]
        del runner._store.write  # when the dead one comes back, its results are too late


async def _never(*_: Any, **__: Any) -> Any:
    await asyncio.Event().wait()


async def test_interactive_requests_preempt_the_lines_of_batches(tmp_path: Path) -> None:
    script = FakeChat(gate=asyncio.Event())
    async with stored_world(tmp_path / "s.db", script) as world:
        batch_id = await begin(world, [line(f"id-{i}", f"line {i}") for i in range(20)])
        await until(lambda: world.workers["w"].num_running == 8)  # flex.concurrency
        assert world.flex.num_running == 8
        assert world.admission.num_waiting == 0
        body = {"model": "m", "messages": [{"role": "user", "content": "now"}]}
        assert (await world.ask(body)).status == 200
        assert world.flex.num_preempted == 8
        await until(lambda: world.workers["w"].num_running == 0)
        await asyncio.sleep(0.2)
        assert world.workers["w"].num_running == 0, "the lane is not quiet yet"
        assert script.gate is not None
        script.gate.set()
        world.clock.advance(1.0)
        batch = await ended(world, batch_id)
        assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
        assert len(await content(world, batch["output_file_id"])) == 20


async def test_a_flex_request_waits_and_is_not_preempted(tmp_path: Path) -> None:
    script = FakeChat(gate=asyncio.Event())
    async with stored_world(tmp_path / "s.db", script) as world:
        flex = {"model": "m", "messages": [{"role": "user", "content": "line"}], "service_tier": "flex"}
        waiting = asyncio.create_task(world.ask(flex))
        await until(lambda: world.workers["w"].num_running == 1)
        assert (await world.ask({"model": "m", "messages": [{"role": "user", "content": "now"}]})).status == 200
        assert world.workers["w"].num_running == 1
        assert script.gate is not None
        script.gate.set()
        assert (await waiting).status == 200
        world.flex._settings = world.flex._settings.__class__(wait_s=0.1)
        refused = await world.ask(flex)  # the virtual clock has not moved since the interactive request
        assert (refused.status, refused.json["error"]["code"]) == (429, "flex_unavailable")
        assert world.flex.num_waiting == world.flex.num_running == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"endpoint": CHAT, "completion_window": "24h"}, "input_file_id"),
        ({"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h"}, "input_file_id"),
        ({"input_file_id": "FILE", "endpoint": "/v1/images", "completion_window": "24h"}, "endpoint"),
        ({"input_file_id": "FILE", "endpoint": CHAT, "completion_window": "0h"}, "completion_window"),
        (
            {"input_file_id": "FILE", "endpoint": CHAT, "completion_window": "24h", "metadata": {"a": "x" * 600}},
            "metadata",
        ),
        ({"input_file_id": "OTHER", "endpoint": CHAT, "completion_window": "24h"}, "input_file_id"),
    ],
)
async def test_a_wrong_batch_names_the_field(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    async with stored_world(tmp_path / "s.db", FakeChat()) as world:
        files = {"FILE": await upload(world, []), "OTHER": (await send_form(world, form(b"x", "user_data"))).json["id"]}
        given = {name: files.get(value, value) if isinstance(value, str) else value for name, value in body.items()}
        got = await call(world, "POST", "/v1/batches", given)
        assert (got.status, got.json["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--" + BOUNDARY,
        b"--" + BOUNDARY + b"--",
        form(b"x")[:-20],
        form(b"x").replace(b'name="file"', b"name=file"),
        form(b"x").replace(b'name="purpose"', b'name="purpos"'),
        form(b"x", "no such purpose"),
        b"--" + BOUNDARY + b"\r\n" * 5000,
        (b"--" + BOUNDARY + b'\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n') * 50,
        b"--"
        + BOUNDARY
        + b'\r\nContent-Disposition: form-data; name="expires_after[seconds]"\r\n\r\n'
        # More digits than Python converts.
        + b"9" * 5000
        + b"\r\n"
        + form(b"x"),
    ],
)
async def test_a_wrong_upload_is_refused(tmp_path: Path, body: bytes) -> None:
    async with stored_world(tmp_path / "s.db", FakeChat()) as world:
        got = await send_form(world, body)
        assert got.status == 400, got.body
        assert (await call(world, "POST", "/v1/files", {"a": 1})).status == 400
        assert (await call(world, "GET", "/v1/files")).json["data"] == []


@pytest.mark.parametrize("more", [b"a" * 8000, b'f="' + b"a" * 8000, b";a=" * 2000, b' ;a="\\' * 1000])
def test_the_head_of_a_part_is_read_in_linear_time(more: bytes) -> None:
    head = b'--x\r\nContent-Disposition: form-data; name="n%d"; '
    body = b"".join(head % i + more + b"\r\n\r\n1\r\n" for i in range(15)) + b"--x--"
    began_s = time.process_time()
    assert len(read_form(b"multipart/form-data; boundary=x", body)) == 15
    assert time.process_time() - began_s < 0.5  # it took 4 s


def test_a_form_with_many_parts_of_one_name_is_refused() -> None:
    part = b'--x\r\nContent-Disposition: form-data; name="n"\r\n\r\n1\r\n'
    with pytest.raises(InvalidRequest, match="too many"):
        read_form(b"multipart/form-data; boundary=x", part * 50 + b"--x--")


async def test_a_file_of_any_bytes_is_kept_and_deleted(tmp_path: Path) -> None:
    async with stored_world(tmp_path / "s.db", FakeChat()) as world:
        data = bytes(range(256)) * 3000 + b"\r\n--" + BOUNDARY[:-1] + b"\r\n"
        got = (await send_form(world, form(data))).json
        assert (got["bytes"], got["filename"], got["purpose"]) == (len(data), "in.jsonl", "batch")
        assert (await call(world, "GET", f"/v1/files/{got['id']}/content")).body == data
        page = (await call(world, "GET", "/v1/files?limit=1")).json
        assert (page["data"][0]["id"], page["has_more"]) == (got["id"], False)
        assert "status_details" not in got  # a text in OpenAI's document, without null
        assert (await call(world, "DELETE", f"/v1/files/{got['id']}")).json["deleted"] is True
        assert (await call(world, "GET", f"/v1/files/{got['id']}/content")).status == 404
        for path in ("/v1/files", "/v1/batches"):
            page = (await call(world, "GET", path)).json
            assert (page["data"], page["first_id"], page["last_id"]) == ([], "", "")
        store = world.gateway._parts.objects._store
        assert await store.read(lambda reader: list(reader.execute("SELECT COUNT(*) FROM file_pieces"))) == [(0,)]
        assert await store.read(lambda reader: list(reader.execute("SELECT SUM(num_bytes) FROM object_bytes"))) == [
            (0,)
        ]


async def test_a_file_above_the_limit_leaves_nothing(tmp_path: Path) -> None:
    async with stored_world(tmp_path / "s.db", FakeChat()) as world:
        world.gateway._parts.objects.files._max_tenant_bytes = 1000
        got = await send_form(world, form(random.Random(0).randbytes(5000)))
        assert (got.status, got.json["error"]["code"]) == (400, "file_quota_exceeded")
        store = world.gateway._parts.objects._store
        for table in ("files", "file_pieces"):
            query = f"SELECT COUNT(*) FROM {table}"
            assert await store.read(lambda reader, query=query: list(reader.execute(query))) == [(0,)]


async def test_a_file_that_is_deleted_meanwhile_is_not_taken_for_whole(tmp_path: Path) -> None:
    async with stored_world(tmp_path / "s.db", FakeChat()) as world:
        lines = [line(f"id-{i}", "line " + "x" * 1000) for i in range(600)]  # more than one piece
        lines[200] += " " * (PIECE_BYTES - len("\n".join(lines[:201])) - 1)  # the first piece ends with a line
        file_id = await upload(world, lines)
        store = world.gateway._parts.objects._store
        first = await store.read(lambda reader: file_table.piece(reader, file_id, 0))
        assert first.endswith(b"\n")
        await store.write(lambda changes: changes.execute("DELETE FROM file_pieces WHERE number > 0"))
        with pytest.raises(ResponseLost):
            await call(world, "GET", f"/v1/files/{file_id}/content")
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        batch = await ended(world, (await call(world, "POST", "/v1/batches", body)).json["id"])
        assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "input_file_gone")


async def test_a_draining_gateway_gives_its_lines_back(tmp_path: Path) -> None:
    script = FakeChat(gate=asyncio.Event())
    async with stored_world(tmp_path / "s.db", script) as world:
        batch_id = await begin(world, [line(f"id-{i}", f"line {i}") for i in range(20)])
        await until(lambda: world.workers["w"].num_running > 0)
        objects = world.gateway._parts.objects
        world.state.begin_drain()
        objects.begin_drain()
        async with asyncio.timeout(10):
            await world.state.wait_idle()
        await until(lambda: objects.batches.runner.num_running == 0)
        await asyncio.sleep(0.2)
        leased = "SELECT COUNT(*) FROM batch_lines WHERE lease_s > 0"
        assert await objects._store.read(lambda reader: list(reader.execute(leased))) == [(0,)]
        assert script.gate is not None
        script.gate.set()
        async with stored_world(tmp_path / "s.db", script) as other:
            assert (await ended(other, batch_id))["request_counts"]["completed"] == 20


async def test_tenants_share_the_places_for_lines(tmp_path: Path) -> None:
    keys = Keys.of("one", "two")
    script = FakeChat(gate=asyncio.Event())
    async with stored_world(tmp_path / "s.db", script, keys=keys) as world:
        for _ in range(3):
            await begin(world, [line(f"id-{i}", f"line {i}") for i in range(200)], keys.header("one"))
        runner = world.gateway._parts.objects.batches.runner
        await until(lambda: runner.num_running == 64)  # batch.running
        late = await begin(world, [line("late", "line late")], keys.header("two"))
        assert script.gate is not None
        script.gate.set()
        for _ in range(500):
            got = (await call(world, "GET", f"/v1/batches/{late}", headers=keys.header("two"))).json
            if got["status"] == "completed":
                break
            await asyncio.sleep(0.02)
        assert got["status"] == "completed"
        assert script.answered.total() < 400, "it did not wait for the lines of the other tenant"


async def test_a_line_that_is_always_preempted_runs_at_last(tmp_path: Path) -> None:
    script = FakeChat(gate=asyncio.Event())
    async with stored_world(tmp_path / "s.db", script) as world:
        batch_id = await begin(world, [line("a", "line a")])
        now = {"model": "m", "messages": [{"role": "user", "content": "now"}]}
        for _ in range(3):  # batch.insist_after
            await until(lambda: world.flex.num_running == 1 and world.workers["w"].num_running == 1)
            assert (await world.ask(now)).status == 200
            await until(lambda: world.flex.num_running == 0)
            world.clock.advance(1.0)
        await until(lambda: world.flex.num_running == 1 and world.workers["w"].num_running == 1)
        assert (await world.ask(now)).status == 200
        assert world.flex.num_running == 1
        assert script.gate is not None
        script.gate.set()
        assert (await ended(world, batch_id))["request_counts"]["completed"] == 1

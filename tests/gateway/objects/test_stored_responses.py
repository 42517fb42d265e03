"""Stored responses at the gateway: continued, retrieved, deleted, run in the background, and seen by their tenant only."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from response_worker import FAST, FakeResponses, Keys, call, events_of, stored_world
from waiting import LONG_S, until
from world import Got, World, _got

from stoker.gateway.objects import response_table as table
from stoker.gateway.objects.object_settings import ResponsesSettings
from stoker.gateway.objects.quota import QUOTA_TABLES
from stoker.gateway.store.sqlite import SqliteStore

PATH = "/v1/responses"


async def create(world: World, body: dict[str, Any], tenant: list[tuple[bytes, bytes]] | None = None) -> Got:
    return await call(world, "POST", PATH, {"model": "m"} | body, tenant or ())


async def wait_status(world: World, response_id: str, status: str) -> Any:
    for _ in range(400):
        got = (await call(world, "GET", f"{PATH}/{response_id}")).json
        if got["status"] == status:
            return got
        await asyncio.sleep(0.02)
    raise AssertionError(got)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_is_continued_by_the_id_of_its_last_response(tmp_path: Path, stream: bool) -> None:
    async with stored_world(tmp_path / "s.db", FakeResponses()) as world:
        ids: list[str] = []
        for turn in range(3):
            body: dict[str, Any] = {"input": f"question {turn}", "stream": stream}
            body |= {"previous_response_id": ids[-1]} if ids else {}
            got = await create(world, body)
            assert got.status == 200, got.body
            response = events_of(got.body)[-1]["response"] if stream else got.json
            assert response["previous_response_id"] == (ids[-1] if ids else None)
            assert response["store"] is True
            assert response["id"].startswith("resp_")
            assert response["output"][0]["content"][0]["text"] == f"turn {2 * turn + 1}"
            ids.append(response["id"])
            if stream:
                events = events_of(got.body)
                assert [event["sequence_number"] for event in events] == list(range(len(events)))
                assert {event["response"]["id"] for event in events if "response" in event} == {response["id"]}
            assert (await call(world, "GET", f"{PATH}/{ids[-1]}")).json == response
        sent = world.workers["w"].jsons[-1]
        assert not {"store", "background", "previous_response_id"} & set(sent)
        texts = [item["content"][0]["text"] for item in sent["input"]]
        assert texts == ["question 0", "turn 1", "question 1", "turn 3", "question 2"]
        # A conversation that is resent has the same items, so it has the same prefix in the cache.
        assert sent["input"][1]["role"] == "assistant"
        listed = (await call(world, "GET", f"{PATH}/{ids[-1]}/input_items")).json
        assert [item["content"][0]["text"] for item in listed["data"]] == ["question 2"]
        assert (await call(world, "DELETE", f"{PATH}/{ids[1]}")).json["deleted"] is True
        broken = await create(world, {"input": "x", "previous_response_id": ids[2]})
        assert (broken.status, broken.json["error"]["code"]) == (400, "previous_response_not_found")
        assert ids[1] in broken.json["error"]["message"]


@pytest.mark.parametrize("background", [False, True])
async def test_a_stream_of_an_engine_with_other_line_ends_is_stored(tmp_path: Path, background: bool) -> None:
    async with stored_world(tmp_path / "s.db", FakeResponses(line_end="\r\n")) as world:
        got = await create(world, {"input": "a", "stream": True, "background": background})
        events = events_of(got.body)
        assert [event["type"] for event in events][-1] == "response.completed"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert (await wait_status(world, events[0]["response"]["id"], "completed"))["output"]


def test_only_as_many_old_responses_as_needed_make_room(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.db")
    store.declare(QUOTA_TABLES)
    store.declare(table.RESPONSE_TABLES)
    names = [f"resp_{i}" for i in range(6)]
    with store.transaction() as changes:
        for i, name in enumerate(names):
            text = random.Random(i).randbytes(500).hex().encode()
            row = {"tenant": "t", "key_id": "k", "expires_s": 9.0, "status": "completed", "previous_id": None}
            stored = table.StoredResponse(id=name, created_s=float(i), input=text, response=b"{}", **row)
            table.insert(changes, stored, 3000)
        left = [name for name in names if table.get(changes, "t", name) is not None]
    store.close()
    assert left == names[-len(left) :]
    assert len(left) > 2, left


async def test_a_response_that_is_not_to_be_stored_is_not(tmp_path: Path) -> None:
    async with stored_world(tmp_path / "s.db", FakeResponses()) as world:
        got = await create(world, {"input": "x", "store": False})
        assert got.json["id"] == "resp_worker"
        first = (await create(world, {"input": "x"})).json["id"]
        got = await create(world, {"input": "y", "store": False, "previous_response_id": first})
        assert got.json["output"][0]["content"][0]["text"] == "turn 3"
        assert (await call(world, "GET", f"{PATH}/{got.json['id']}")).status == 404
    async with stored_world(
        tmp_path / "s.db", FakeResponses(), settings=ResponsesSettings(store_default=False)
    ) as world:
        assert (await create(world, {"input": "x"})).json["id"] == "resp_worker"
        assert (await create(world, {"input": "x", "store": True})).json["id"] != "resp_worker"


async def test_another_tenant_sees_nothing(tmp_path: Path) -> None:
    keys = Keys.of("one", "two")
    async with stored_world(tmp_path / "s.db", FakeResponses(), keys=keys) as world:
        mine, other = keys.header("one"), keys.header("two")
        stored = (await create(world, {"input": "secret"}, mine)).json["id"]
        background = (await create(world, {"input": "s", "background": True}, mine)).json["id"]
        for one in (stored, background):
            for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
                assert (await call(world, method, f"{PATH}/{one}{path}", headers=other)).status == 404
                assert (await call(world, method, f"{PATH}/{one}{path}")).status == 401
            assert (await create(world, {"input": "x", "previous_response_id": one}, other)).status == 400
            assert (await call(world, "GET", f"{PATH}/{one}", headers=mine)).status == 200


async def test_another_gateway_continues_and_retrieves(tmp_path: Path) -> None:
    script = FakeResponses()
    async with stored_world(tmp_path / "s.db", script) as one, stored_world(tmp_path / "s.db", script) as two:
        first = (await create(one, {"input": "a"})).json["id"]
        second = (await create(two, {"input": "b", "previous_response_id": first})).json
        assert second["output"][0]["content"][0]["text"] == "turn 3"
        assert (await call(one, "GET", f"{PATH}/{second['id']}")).json == second


async def test_a_background_response_survives_its_client(tmp_path: Path) -> None:
    script = FakeResponses(hold=asyncio.Event())
    async with stored_world(tmp_path / "s.db", script) as world:
        created = (await create(world, {"input": "a", "background": True})).json
        assert (created["status"], created["background"], created["store"]) == ("queued", True, True)
        streamed = await world.send(
            b'{"model":"m","input":"a","background":true,"stream":true}', PATH
        )  # read a little, and leave
        await until(lambda: world.workers["w"].num_running == 2)
        streamed.abort()
        assert (await wait_status(world, created["id"], "in_progress"))["output"] == []
        assert script.hold is not None
        script.hold.set()
        done = await wait_status(world, created["id"], "completed")
        assert done["output"][0]["content"][0]["text"] == "turn 1"
        assert done["usage"]["total_tokens"] == 12
        assert world.workers["w"].num_gone == 0
        # It can be continued like any other.
        after = await create(world, {"input": "b", "previous_response_id": created["id"]})
        assert after.json["output"][0]["content"][0]["text"] == "turn 3"
        await until(lambda: len(world.rows.rows) == 3)  # each is billed


async def test_a_stream_that_is_reconnected_has_the_same_bytes(tmp_path: Path) -> None:
    script = FakeResponses()
    async with stored_world(tmp_path / "s.db", script) as world, stored_world(tmp_path / "s.db", script) as other:
        script.hold = asyncio.Event()
        asking = asyncio.create_task(create(world, {"input": "a", "background": True, "stream": True}))
        await until(lambda: world.workers["w"].num_running == 1)
        await asyncio.sleep(0.2)
        script.hold.set()
        unbroken = (await asking).body
        events = events_of(unbroken)
        response_id = events[0]["response"]["id"]
        assert events[-1]["type"] == "response.completed"
        pieces = [piece + b"\n\n" for piece in unbroken.split(b"\n\n") if piece]
        for gateway in (world, other):
            for after in (-1, 0, 3, len(pieces) - 2):
                path = f"{PATH}/{response_id}?stream=true&starting_after={after}"
                again = await call(gateway, "GET", path)
                assert again.body == b"".join(pieces[after + 1 :])
        # Reconnected while it still runs, at both gateways.
        script.hold = asyncio.Event()
        first = asyncio.create_task(create(world, {"input": "a", "background": True, "stream": True}))
        await until(lambda: world.workers["w"].num_running == 1)
        await asyncio.sleep(0.2)
        [row] = world.gateway._parts.objects.responses.runs._tasks
        path = f"{PATH}/{row}?stream=true"
        second = [asyncio.create_task(call(gateway, "GET", path)) for gateway in (world, other)]
        await asyncio.sleep(0.2)
        script.hold.set()
        assert {(await one).body for one in second} == {(await first).body}
        assert (await call(world, "GET", f"{PATH}/{row}?stream=true&starting_after=x")).status == 400


@pytest.mark.parametrize("at_other", [False, True])
async def test_a_background_response_is_cancelled(tmp_path: Path, at_other: bool) -> None:
    script = FakeResponses(hold=asyncio.Event())
    async with stored_world(tmp_path / "s.db", script) as world, stored_world(tmp_path / "s.db", script) as other:
        created = (await create(world, {"input": "a", "background": True})).json["id"]
        await until(lambda: world.workers["w"].num_running == 1)
        got = await call(other if at_other else world, "POST", f"{PATH}/{created}/cancel")
        assert got.json["status"] == "cancelled", got.json
        await until(lambda: world.workers["w"].num_running == 0)
        assert (await call(world, "POST", f"{PATH}/{created}/cancel")).json["status"] == "cancelled"
        refused = await create(world, {"input": "x", "previous_response_id": created})
        assert refused.status == 400
        deleted = (await create(world, {"input": "a", "background": True})).json["id"]
        await until(lambda: world.workers["w"].num_running == 1)
        await call(other if at_other else world, "DELETE", f"{PATH}/{deleted}")
        await until(lambda: world.workers["w"].num_running == 0)
        assert (await call(world, "GET", f"{PATH}/{deleted}")).status == 404


async def test_a_busy_fleet_delays_a_background_response(tmp_path: Path) -> None:
    async with stored_world(tmp_path / "s.db", FakeResponses(refuses=[503] * 4)) as world:
        created = (await create(world, {"input": "a", "background": True})).json["id"]
        assert (await wait_status(world, created, "completed"))["usage"]["total_tokens"] == 12


@pytest.mark.parametrize("verb", ["cancel", "delete"])
async def test_a_background_response_that_waits_for_a_busy_fleet_is_stopped(tmp_path: Path, verb: str) -> None:
    script = FakeResponses(refuses=[503] * 1000)
    async with stored_world(tmp_path / "s.db", script) as world:
        created = (await create(world, {"input": "a", "background": True})).json["id"]
        runs = world.gateway._parts.objects.responses.runs
        await until(lambda: len(script.refuses) < 1000 and runs._running[created].is_complete)
        if verb == "cancel":
            got = await call(world, "POST", f"{PATH}/{created}/cancel")
            assert got.json["status"] == "cancelled", got.json
        else:
            await call(world, "DELETE", f"{PATH}/{created}")
        await until(lambda: not runs._tasks)  # it does not try again


async def test_a_request_that_the_worker_refuses_fails(tmp_path: Path) -> None:
    async with stored_world(tmp_path / "s.db", FakeResponses(refuses=[400, 400])) as world:
        created = (await create(world, {"input": "a", "background": True})).json["id"]
        failed = await wait_status(world, created, "failed")
        assert failed["error"] == {"code": "invalid_prompt", "message": "no"}
        streamed = await create(world, {"input": "a", "background": True, "stream": True})
        assert events_of(streamed.body)[-1]["type"] == "response.failed"


async def test_a_gateway_that_dies_is_replaced(tmp_path: Path) -> None:
    """A response without a stream runs again elsewhere. A streamed one, whose events a client may have, ends as failed."""
    script = FakeResponses(hold=asyncio.Event())
    async with stored_world(tmp_path / "s.db", script) as survivor, stored_world(tmp_path / "s.db", script) as dying:
        plain = (await create(dying, {"input": "a", "background": True})).json["id"]
        streaming = asyncio.create_task(create(dying, {"input": "a", "background": True, "stream": True}))
        await until(lambda: dying.workers["w"].num_running == 2)
        await asyncio.sleep(0.3)  # the first events are stored
        runs = dying.gateway._parts.objects.responses.runs
        [streamed] = set(runs._tasks) - {plain}
        runs._keeper.cancel()  # dead: nothing renews the leases, and nothing is written any more
        runs._tasks.clear()
        runs._store.write = _never
        assert script.hold is not None
        script.hold = None
        done = await wait_status(survivor, plain, "completed")
        assert done["output"][0]["content"][0]["text"] == "turn 1"
        failed = await wait_status(survivor, streamed, "failed")
        assert "has stopped" in failed["error"]["message"]
        again = events_of((await call(survivor, "GET", f"{PATH}/{streamed}?stream=true")).body)
        assert [event["sequence_number"] for event in again] == list(range(len(again)))
        assert again[-1]["type"] == "response.failed"
        streaming.cancel()


async def _never(*_: Any, **__: Any) -> Any:
    await asyncio.Event().wait()


async def test_sizes_and_counts_are_bounded(tmp_path: Path) -> None:
    small = dataclasses.replace(FAST, max_tenant_mib=0.002, max_background=1, max_turns=2, max_mib=0.01)
    script = FakeResponses()
    async with stored_world(tmp_path / "s.db", script, settings=small) as world:
        ids = [(await create(world, {"input": f"a{i}"})).json["id"] for i in range(8)]
        kept = [one for one in ids if (await call(world, "GET", f"{PATH}/{one}")).status == 200]
        assert kept == ids[-len(kept) :], "the oldest make room"
        assert 1 <= len(kept) < 8
        too_large = await create(world, {"input": "x" * 20_000})
        assert (too_large.status, too_large.json["store"]) == (200, False)
        streamed = await create(world, {"input": "x" * 20_000, "stream": True})
        assert events_of(streamed.body)[-1]["response"]["store"] is False
        assert (await create(world, {"input": "x" * 20_000, "background": True})).status == 400
        script.hold = asyncio.Event()
        first = await create(world, {"input": "a", "background": True})
        second = await create(world, {"input": "a", "background": True})
        assert (first.status, second.status) == (200, 429)
        script.hold.set()
        await wait_status(world, first.json["id"], "completed")
    async with stored_world(tmp_path / "t.db", script, settings=dataclasses.replace(FAST, max_turns=2)) as world:
        one = (await create(world, {"input": "1"})).json["id"]
        two = (await create(world, {"input": "2", "previous_response_id": one})).json["id"]
        three = (await create(world, {"input": "3", "previous_response_id": two})).json["id"]
        long = await create(world, {"input": "4", "previous_response_id": three})
        assert long.status == 400
        assert "2 turns" in long.json["error"]["message"]


async def test_responses_expire_and_a_continued_conversation_stays(tmp_path: Path) -> None:
    async with stored_world(tmp_path / "s.db", FakeResponses()) as world:
        objects = world.gateway._parts.objects
        first = (await create(world, {"input": "a"})).json["id"]
        lonely = (await create(world, {"input": "a"})).json["id"]
        now_s = objects.responses._unix_time()
        for clock in (objects, objects.responses):
            clock._unix_time = lambda: now_s + 20 * 86_400
        second = (await create(world, {"input": "b", "previous_response_id": first})).json["id"]
        for clock in (objects, objects.responses):
            clock._unix_time = lambda: now_s + 40 * 86_400
        assert await objects.expire_some() == 1
        assert (await call(world, "GET", f"{PATH}/{lonely}")).status == 404
        assert (await create(world, {"input": "c", "previous_response_id": second})).status == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "a", "background": True, "store": False}, "background"),
        ({"input": 5}, "input"),
        ({"input": "a", "previous_response_id": 5}, "previous_response_id"),
        ({"input": "a", "previous_response_id": "resp_invented"}, "previous_response_id"),
        ({"input": "a", "store": "yes"}, "store"),
        ({"input": "a", "background": True, "temperature": 7}, "temperature"),
    ],
)
async def test_bad_input_names_the_field(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    async with stored_world(tmp_path / "s.db", FakeResponses()) as world:
        got = await create(world, body)
        assert (got.status, got.json["error"]["param"]) == (400, param)
        for path in ("resp_x", "resp_x/cancel/y", "resp_x/y", "%2e", ""):
            assert (await call(world, "GET", f"{PATH}/{path}")).status in (400, 404, 405)
        assert (await call(world, "PUT", f"{PATH}/resp_x", {})).status == 405


async def test_an_answer_is_delivered_while_the_store_fails(tmp_path: Path) -> None:
    async with stored_world(tmp_path / "s.db", FakeResponses()) as world:
        from stoker.gateway.store.store import StoreUnavailable

        async def fails(*_: Any, **__: Any) -> Any:
            raise StoreUnavailable("gone")

        world.gateway._parts.objects.responses._store.write = fails
        for stream in (False, True):
            got = await create(world, {"input": "a", "stream": stream})
            response = events_of(got.body)[-1]["response"] if stream else got.json
            assert (response["status"], response["store"]) == ("completed", False)
        assert (await create(world, {"input": "a", "background": True})).status == 503


async def test_hostile_ids_and_queries_are_refused(tmp_path: Path) -> None:
    async with stored_world(tmp_path / "s.db", FakeResponses()) as world:
        one = (await create(world, {"input": "a"})).json["id"]
        for name in ("resp_\0", "x" * 5000, "", "../x", "resp_%00"):
            got = await create(world, {"input": "a", "previous_response_id": name})
            assert (got.status, got.json["error"]["code"]) == (400, "previous_response_not_found")
        for query in (
            "limit=" + "9" * 5000,
            "limit=0",
            "limit=-1",
            "after=%00",
            "order=up",
            "after=none",
            "limit=%C2%B2",
        ):
            assert (await call(world, "GET", f"{PATH}/{one}/input_items?{query}")).status == 400, query
            assert (await call(world, "GET", f"/v1/files?{query}")).status == 400, query
        for query in ("limit=x", "after=%00", "after=none"):
            assert (await call(world, "GET", f"/v1/batches?{query}")).status == 400, query
        assert (await call(world, "GET", "/v1/files?purpose=%00")).status == 400
        streamed = (await create(world, {"input": "a", "background": True, "stream": True})).body
        path = f"{PATH}/{events_of(streamed)[0]['response']['id']}?stream=true&starting_after="
        for number in ("%C2%B2", "x", "", "--1", "9" * 5000):
            assert (await call(world, "GET", path + number)).status == (400 if number else 200), number
        for path in ("/v1/files/%20", "/v1/files/x/content", "/v1/batches/%20", "/v1/batchesx", "/v1/filesx"):
            assert (await call(world, "GET", path)).status in (400, 404), path


async def test_a_conversation_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    """Compressed, it is small, so its size must be known before it is read."""
    large = dataclasses.replace(FAST, max_mib=16)
    async with stored_world(tmp_path / "s.db", FakeResponses(), settings=large) as world:
        previous = None
        for _ in range(4):
            body = {"input": "a" * 400_000} | ({"previous_response_id": previous} if previous else {})
            got = await create(world, body)
            if got.status != 200:
                break
            previous = got.json["id"]
        assert got.status == 400
        assert got.json["error"]["param"] == "previous_response_id"
        assert "1048576" in got.json["error"]["message"]  # the gateway of these tests accepts bodies of 1 MiB


async def test_a_stored_conversation_is_counted(tmp_path: Path) -> None:
    keys = Keys.of("one")
    keys.settings = [dataclasses.replace(keys.settings[0], concurrency=1)]
    async with stored_world(tmp_path / "s.db", FakeResponses(), dialect="stoker", keys=keys) as world:
        mine = keys.header("one")
        first = (await create(world, {"input": "a"}, mine)).json
        counting = f"{PATH}/input_tokens"
        body = {"model": "m", "input": "b", "previous_response_id": first["id"]}
        assert (await call(world, "POST", counting, body, mine)).status == 200
        sent = world.workers["w"].jsons[-1]
        assert world.workers["w"].paths[-1] == counting
        assert [item["role"] for item in sent["input"]] == ["user", "assistant", "user"]
        assert "previous_response_id" not in sent
        body = {"model": "m", "input": "b", "previous_response_id": "resp_" + "0" * 48}
        got = await call(world, "POST", counting, body, mine)
        assert (got.status, got.json["error"]["code"]) == (400, "previous_response_not_found")


@pytest.mark.parametrize(
    "path", ["/health", "/ready", PATH, f"{PATH}/resp_x", "/v1/files", "/v1/batches", "/v1/models"]
)
async def test_trace_is_not_allowed(tmp_path: Path, path: str) -> None:
    async with stored_world(tmp_path / "s.db", FakeResponses()) as world:
        got = await call(world, "TRACE", path)
        assert (got.status, got.json["error"]["code"]) == (405, "method_not_allowed")
        assert got.headers["allow"]


MANY_FIELDS = b'{"model":"m","input":"x",%b}' % b",".join(b'"%d":1' % number for number in range(60_000))
MANY_VALUES = b'{"model":"m","input":[%b{}]}' % (b"{}," * 100_001)


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [(MANY_FIELDS, "too_many_fields", "50000 are allowed"), (MANY_VALUES, "invalid_request", "100000 values")],
    ids=["fields", "values"],
)
@pytest.mark.parametrize("path", [PATH, f"{PATH}/input_tokens"])
async def test_a_body_of_very_many_parts_is_refused(
    tmp_path: Path, path: str, body: bytes, code: str, says: str
) -> None:
    async with stored_world(tmp_path / "s.db", FakeResponses()) as world:
        stored = (await create(world, {"input": "a"})).json["id"]
        continued = body.replace(b"{", b'{"previous_response_id":"%b",' % stored.encode(), 1)
        for one in (body, continued) if path == PATH else (continued,):
            got = await send_bytes(world, path, one)
            assert (got.status, got.json["error"]["code"]) == (400, code)
            assert says in got.json["error"]["message"]


async def test_a_background_response_with_very_many_tools_is_refused(tmp_path: Path) -> None:
    async with stored_world(tmp_path / "s.db", FakeResponses()) as world:
        body = b'{"model":"m","background":true,"input":"x","tools":[%b{}]}' % (b"{}," * 100_001)
        got = await send_bytes(world, PATH, body)
        assert got.status == 400
        assert "100000 values" in got.json["error"]["message"]


async def send_bytes(world: World, path: str, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> Got:
    sent = await world.client.send(b"POST", path.encode(), headers, body, connect_s=LONG_S, head_s=LONG_S)
    return await _got(sent)


async def test_a_text_with_many_commas_is_stored(tmp_path: Path) -> None:
    async with stored_world(tmp_path / "s.db", FakeResponses()) as world:
        items = [{"role": "user", "content": '1,"2",\\"' * 40_000}]
        got = await create(world, {"input": items})
        assert got.json["store"] is True
        listed = (await call(world, "GET", f"{PATH}/{got.json['id']}/input_items")).json["data"]
        assert listed[0]["content"][0]["text"] == items[0]["content"]


async def test_the_items_of_a_conversation_keep_their_text(tmp_path: Path) -> None:
    """They are joined as they were sent, and not decoded."""
    async with stored_world(tmp_path / "s.db", FakeResponses()) as world:
        first = await send_bytes(world, PATH, b'{"model":"m", "input" : [ ] }')
        given = b'{"model":"m","previous_response_id":"%b", "input" : [ {"role":"user", "content":"\\u00e9] "} ,\n{"n":1e2}\n ] }'
        second = await send_bytes(world, PATH, given % first.json["id"].encode())
        third = await create(world, {"input": [], "previous_response_id": second.json["id"]})
        assert third.status == 200
        sent = world.workers["w"].jsons[-1]["input"]
        assert [item.get("content", item) for item in sent if item.get("role") != "assistant"] == ["é] ", {"n": 100.0}]
        assert b'[{"id": "msg_1"' in world.workers["w"].bodies[-1]
        assert b'{"role":"user", "content":"\\u00e9] "} ,\n{"n":1e2}' in world.workers["w"].bodies[-1]


async def test_pages_of_items_follow_their_ids(tmp_path: Path) -> None:
    async with stored_world(tmp_path / "s.db", FakeResponses()) as world:
        items = [{"role": "user", "content": f"{number}"} for number in range(7)]
        items[3] |= {"id": "msg_mine"}
        path = f"{PATH}/{(await create(world, {'input': items})).json['id']}/input_items"
        seen, after = [], ""
        while True:
            page = (await call(world, "GET", f"{path}?order=asc&limit=2{after}")).json
            seen += [item["content"][0]["text"] for item in page["data"]]
            if not page["has_more"]:
                break
            after = f"&after={page['last_id']}"
        assert seen == [f"{number}" for number in range(7)]
        rest = (await call(world, "GET", f"{path}?after=msg_mine")).json
        assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "1", "0"]


async def test_a_key_above_its_limit_reads_no_conversation(tmp_path: Path) -> None:
    keys = Keys.of("one")
    keys.settings = [dataclasses.replace(keys.settings[0], requests_per_minute=1)]
    async with stored_world(tmp_path / "s.db", FakeResponses(), keys=keys) as world:
        mine = keys.header("one")
        first = (await create(world, {"input": "a"}, mine)).json["id"]
        responses = world.gateway._parts.objects.responses

        async def read(*_: Any) -> Any:
            raise AssertionError("a conversation was read")

        responses._store.read = read
        for more in ({}, {"background": True}):
            got = await create(world, {"input": "b", "previous_response_id": first, **more}, mine)
            assert (got.status, got.json["error"]["code"]) == (429, "rate_limited")


async def test_long_conversations_at_a_time_are_bounded(tmp_path: Path) -> None:
    """A short request can continue a long conversation, which the gateway then holds."""
    script = FakeResponses(hold=asyncio.Event())
    async with stored_world(tmp_path / "s.db", script, max_held_bytes=500_000) as world:
        assert script.hold is not None
        long = (await create(world, {"input": "x" * 200_000})).json["id"]
        body = {"input": "a", "stream": True, "previous_response_id": long}
        responses = world.gateway._parts.objects.responses
        first = asyncio.create_task(create(world, body))
        await until(lambda: responses._held.held_bytes > 200_000)
        got = await create(world, body)
        assert (got.status, got.json["error"]["code"]) == (503, "overloaded")
        assert int(got.headers["retry-after"]) >= 1
        assert (await create(world, {"input": "a" * 200_000, "background": True})).status == 503
        script.hold.set()
        assert (await first).status == 200
        assert responses._held.held_bytes == 0
        background = (await create(world, {"input": "a" * 50_000, "background": True})).json["id"]
        await wait_status(world, background, "completed")
        await until(lambda: responses._held.held_bytes == 0)


async def test_streams_of_one_tenant_are_bounded(tmp_path: Path) -> None:
    keys, script = Keys.of("one", "two"), FakeResponses(hold=asyncio.Event())
    few = dataclasses.replace(FAST, max_background=1)
    async with stored_world(tmp_path / "s.db", script, keys=keys, settings=few) as world:
        assert script.hold is not None
        mine, other = keys.header("one"), keys.header("two")
        open_streams = world.gateway._parts.objects.responses._streams._num_open
        streams = [asyncio.create_task(create(world, {"input": "a", "background": True, "stream": True}, mine))]
        await until(lambda: open_streams["one"] == 1)
        rows = await world.gateway._parts.objects._store.read(
            lambda reader: list(reader.execute("SELECT id FROM responses WHERE is_streamed = 1"))
        )
        path = f"{PATH}/{rows[0][0]}?stream=true"
        streams += [asyncio.create_task(call(world, "GET", path, headers=mine)) for _ in range(3)]
        await until(lambda: open_streams["one"] == 4)
        refused = await call(world, "GET", path, headers=mine)
        assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limited")
        assert (await create(world, {"input": "a", "background": True, "stream": True}, mine)).status == 429
        assert (await call(world, "GET", path, headers=other)).status == 404
        script.hold.set()
        bodies = [(await stream).body for stream in streams]
        assert len(set(bodies)) == 1
        assert events_of(bodies[0])[-1]["type"] == "response.completed"
        assert not open_streams


async def test_a_key_that_is_revoked_in_mid_stream_keeps_only_what_runs(tmp_path: Path) -> None:
    keys, script = Keys.of("one"), FakeResponses(hold=asyncio.Event())
    async with stored_world(tmp_path / "s.db", script) as world:
        assert script.hold is not None
        mine, known = keys.header("one"), world.gateway._parts.keys
        known.set_stored(keys.settings, any_key=True)
        running = [
            asyncio.create_task(create(world, {"input": "a", "stream": True, "background": background}, mine))
            for background in (False, True)
        ]
        await until(lambda: world.workers["w"].num_running == 2)
        known.set_stored([], any_key=True)
        for method, path, body in (
            ("POST", PATH, {"model": "m", "input": "a"}),
            ("POST", "/v1/chat/completions", {"model": "m", "messages": []}),
            ("POST", "/v1/messages", {"model": "m", "messages": []}),
            ("POST", "/v1/batches", {}),
            ("GET", f"{PATH}/resp_x", None),
            ("GET", "/v1/files", None),
            ("GET", "/v1/batches", None),
        ):
            assert (await call(world, method, path, body, mine)).status == 401, path
        script.hold.set()
        for stream in running:
            assert events_of((await stream).body)[-1]["type"] == "response.completed"


async def test_a_response_of_a_revoked_key_is_not_taken_over(tmp_path: Path) -> None:
    keys, script = Keys.of("one"), FakeResponses(hold=asyncio.Event())
    store = tmp_path / "s.db"
    async with stored_world(store, script) as survivor, stored_world(store, script, keys=keys) as dying:
        mine = keys.header("one")
        begun = asyncio.create_task(create(dying, {"input": "a", "background": True, "stream": True}, mine))
        await until(lambda: dying.workers["w"].num_running == 1)
        runs = dying.gateway._parts.objects.responses.runs
        [response_id] = runs._tasks
        runs._keeper.cancel()
        runs._tasks.clear()
        runs._store.write = _never
        known = survivor.gateway._parts.keys
        known.set_stored([dataclasses.replace(keys.settings[0], name="another")], any_key=True)
        while (got := (await call(survivor, "GET", f"{PATH}/{response_id}", headers=mine)).json)["status"] != "failed":
            assert got["status"] in ("queued", "in_progress")
            await asyncio.sleep(0.05)
        assert survivor.workers["w"].bodies == []
        begun.cancel()


async def test_a_response_that_is_deleted_in_mid_stream_leaves_nothing(tmp_path: Path) -> None:
    script = FakeResponses(hold=asyncio.Event())
    async with stored_world(tmp_path / "s.db", script) as world:
        objects = world.gateway._parts.objects
        first = asyncio.create_task(create(world, {"input": "a", "background": True, "stream": True}))
        await until(lambda: world.workers["w"].num_running == 1)
        [response_id] = objects.responses.runs._tasks
        second = asyncio.create_task(call(world, "GET", f"{PATH}/{response_id}?stream=true&starting_after=1"))
        await until(lambda: objects.responses._streams._num_open["default"] == 2)
        assert (await call(world, "DELETE", f"{PATH}/{response_id}")).json["deleted"] is True
        assert (await call(world, "DELETE", f"{PATH}/{response_id}")).status == 404
        for stream in (first, second):
            kinds = [event["type"] for event in events_of((await stream).body)]
            assert "response.completed" not in kinds
        await until(lambda: world.workers["w"].num_running == 0 and not objects.responses.runs._tasks)
        left = await objects._store.read(
            lambda reader: (
                [list(reader.execute(f"SELECT COUNT(*) FROM {name}")) for name in ("responses", "response_events")]
                + [list(reader.execute("SELECT SUM(num_bytes) FROM object_bytes"))]
            )
        )
        assert left == [[(0,)], [(0,)], [(0,)]]
        assert (await call(world, "GET", f"{PATH}/{response_id}?stream=true")).status == 404

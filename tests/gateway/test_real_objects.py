"""Stored responses, files and batches with OpenAI's own client, real processes, and kill -9 of each of them."""

from __future__ import annotations

import io
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from real_fleet import WORKER_OPTIONS, Process
from worker.real import wait_for

BLOCK_TOKENS = 16
CONFIG = "[responses]\nlease_s = 1.0\n[batch]\npoll_s = 0.2\n[flex]\nquiet_s = 0.1\nconcurrency = 4\n"
LINES = 60
StartGateway = Callable[[str], Process]


@pytest.fixture(scope="module")
def worker(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = Process(["serve", str(tiny_folder), *WORKER_OPTIONS], tmp_path_factory.mktemp("w") / "worker.log")
    process.start()
    yield process
    process.stop()
    assert "Traceback" not in process.log_path.read_text()


@pytest.fixture
def start_gateway(worker: Process, tmp_path: Path) -> Iterator[StartGateway]:
    started: list[Process] = []
    config = tmp_path / "gateway.toml"
    config.write_text(CONFIG)

    def start(store: str) -> Process:
        arguments = ["gateway", "--config", str(config), "--store", store, "--worker", worker.url]
        gateway = Process(arguments, tmp_path / f"gateway{len(started)}.log")
        started.append(gateway)
        gateway.start()
        wait_for(lambda: gateway.is_ready, 60)
        return gateway

    yield start
    for gateway in started:
        gateway.stop()
        assert "Traceback" not in gateway.log_path.read_text()


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue("postgres_url") if request.param == "postgres" else str(tmp_path / "store.db")


def client_of(gateway: Process) -> openai.OpenAI:
    url = f"{gateway.url}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60, _strict_response_validation=True)


def ended(client: openai.OpenAI, response_id: str) -> Any:
    found: list[Any] = []

    def look() -> bool:
        with suppress(openai.APIConnectionError, openai.InternalServerError):
            found.append(client.responses.retrieve(response_id))
        return bool(found) and found[-1].status not in ("queued", "in_progress")

    wait_for(look, 60)
    return found[-1]


def test_a_stored_conversation_hits_the_prefix_cache(start_gateway: StartGateway, store: str) -> None:
    gateway = start_gateway(store)
    other = start_gateway(store)
    previous: str | None = None
    before = 0
    for turn in range(3):
        client = client_of(gateway if turn % 2 == 0 else other)
        answer = client.responses.create(
            model="tiny",
            input=f"Question {turn}: " + "what is the weather in Paris today? " * 4,
            previous_response_id=previous if previous is not None else openai.omit,
            max_output_tokens=20,
            temperature=0,
        )
        assert answer.usage is not None
        assert answer.previous_response_id == previous
        assert answer.usage.input_tokens_details.cached_tokens >= before // BLOCK_TOKENS * BLOCK_TOKENS
        before, previous = answer.usage.input_tokens, answer.id
        assert client.responses.retrieve(answer.id) == answer
    items = client.responses.input_items.list(previous).data
    assert items[0].content[0].text.startswith("Question 2")
    client.responses.delete(previous)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(previous)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="tiny", input="x", previous_response_id=previous)
    assert refused.value.code == "previous_response_not_found"


def test_a_background_stream_is_continued_after_a_disconnect(start_gateway: StartGateway, store: str) -> None:
    gateway = start_gateway(store)
    client = client_of(gateway)
    fields: dict[str, Any] = {"model": "tiny", "input": "Count.", "max_output_tokens": 120, "temperature": 1}
    seen: list[Any] = []
    with client.responses.create(**fields, background=True, stream=True) as stream:
        for event in stream:
            seen.append(event)
            if event.sequence_number == 7:
                break  # and disconnect
    response_id = seen[0].response.id
    with client.responses.retrieve(response_id, stream=True, starting_after=7) as stream:
        seen += list(stream)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type in ("response.completed", "response.incomplete")
    assert seen[-1].response.status == ended(client, response_id).status

    def read(path: str) -> bytes:
        with urllib.request.urlopen(f"{gateway.url}/v1/responses/{response_id}{path}", timeout=60) as answer:
            return bytes(answer.read())

    unbroken = read("?stream=true")
    events = [one + b"\n\n" for one in unbroken.split(b"\n\n") if one]
    assert read("?stream=true&starting_after=7") == b"".join(events[8:])
    assert [json.loads(one.split(b"data: ")[1])["type"] for one in events] == [event.type for event in seen]
    running = client.responses.create(**fields | {"max_output_tokens": 900}, background=True)
    assert client.responses.cancel(running.id).status == "cancelled"


def test_a_background_response_survives_kill_9_of_the_gateway(start_gateway: StartGateway, store: str) -> None:
    gateway = start_gateway(store)
    client = client_of(gateway)
    fields: dict[str, Any] = {"model": "tiny", "input": "Count.", "max_output_tokens": 300, "temperature": 1}
    client.responses.create(**fields | {"max_output_tokens": 1})  # so that all find the same in the prefix cache
    unbroken = client.responses.create(**fields, extra_body={"seed": 7})
    plain = client.responses.create(**fields, background=True)
    seen: list[Any] = []
    with client.responses.create(**fields, background=True, stream=True, extra_body={"seed": 7}) as stream:
        for event in stream:
            seen.append(event)
            if event.sequence_number == 12:
                gateway.kill()
                break
    gateway.start()
    client = client_of(gateway)
    assert ended(client, plain.id).status == "incomplete"  # it ran again to its token limit
    response_id = seen[0].response.id
    done = ended(client, response_id)
    assert (done.status, done.output_text) == ("incomplete", unbroken.output_text)  # as if nothing had happened
    assert done.usage == unbroken.usage
    with client.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number) as stream:
        seen += list(stream)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == done.output_text
    assert len({event.item_id for event in seen if event.type == "response.output_text.delta"}) == 1
    assert seen[-1].response.id == response_id

    # The gateways billed the tokens that they generated, and each of the four prompts is billed once.
    wait_for(lambda: gateway.metrics()["stoker_gateway_ledger_pending_rows"] == 0)
    with urllib.request.urlopen(f"{gateway.url}/v1/usage", timeout=60) as answer:
        total = json.loads(answer.read())["total"]
    assert unbroken.usage is not None
    assert total["prompt_tokens"] == 4 * unbroken.usage.input_tokens


def test_kill_9_of_gateway_and_worker_leaves_each_line_once(
    start_gateway: StartGateway, store: str, worker: Process
) -> None:
    gateway = start_gateway(store)
    client = client_of(gateway)
    lines = [
        {
            "custom_id": f"line-{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "tiny", "max_tokens": 40, "messages": [{"role": "user", "content": f"Say {i}."}]},
        }
        for i in range(LINES)
    ]
    lines.append(lines[0] | {"custom_id": "line-bad", "body": {"model": "tiny", "messages": []}})
    data = "\n".join(json.dumps(line) for line in lines).encode()
    file = client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")
    assert client.files.content(file.id).read() == data
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"run": "1"}
    )
    done, num_kills = -1, 0
    for kill in (gateway, worker, gateway):
        done = wait_progress(client_of(gateway), batch.id, done + 1)
        if done < 0:
            break  # it is complete already
        kill.kill()
        num_kills += 1
        kill.start()
        wait_for(lambda: gateway.is_ready, 60)
    assert num_kills >= 2, "the batch was too fast"
    client = client_of(gateway)
    wait_for(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed", "expired"), 120)
    batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
        LINES + 1,
        LINES,
        1,
    )
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    output = [json.loads(one) for one in client.files.content(batch.output_file_id).text.splitlines()]
    assert [one["custom_id"] for one in output] == [f"line-{i}" for i in range(LINES)]
    assert all(one["response"]["body"]["choices"][0]["message"]["content"] is not None for one in output)
    [bad] = [json.loads(one) for one in client.files.content(batch.error_file_id).text.splitlines()]
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("line-bad", 400)
    assert [one.id for one in client.batches.list(limit=1)] == [batch.id]
    assert client.files.delete(file.id).deleted


def wait_progress(client: openai.OpenAI, batch_id: str, least: int) -> int:
    """Return how many lines are done once `least` are; -1 if the batch is complete."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        batch = client.batches.retrieve(batch_id)
        counts = batch.request_counts
        if batch.status == "completed":
            return -1
        if counts is not None and batch.status == "in_progress" and counts.completed >= least:
            return counts.completed
        time.sleep(0.05)
    raise AssertionError(batch)

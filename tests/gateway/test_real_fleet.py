"""Gateways and workers as real processes: two gateways agree, workers register, a stopped worker is left."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from real_fleet import ADMIN_TOKEN, WORKER_OPTIONS, Exchange, Process, RealFleet, real_fleet, usable_workers
from worker.real import STOKER, wait_for

WORDS = "river stone lamp garden signal copper winter orbit pepper violin"


@pytest.fixture(scope="module")
def fleet(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    with real_fleet(tiny_folder, tmp_path_factory.mktemp("fleet"), gateway_options=("--debug-routes",)) as fleet:
        yield fleet
    assert "Traceback" not in fleet.gateway.log_path.read_text()


@pytest.fixture
def second(fleet: RealFleet, tmp_path: Path) -> Iterator[Process]:
    """A second gateway in front of the same workers."""
    (tmp_path / "token").write_text(ADMIN_TOKEN)
    arguments = ["gateway", "--admin-token-file", str(tmp_path / "token"), "--store", "none", "--debug-routes"]
    for worker in fleet.workers:
        arguments += ["--worker", worker.url]
    gateway = Process(arguments, tmp_path / "second.log")
    gateway.start()
    wait_for(lambda: usable_workers(gateway) == len(fleet.workers))
    yield gateway
    gateway.stop()


def ask(gateway: Process, messages: list[dict[str, str]], **headers: str) -> Exchange:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    exchange = Exchange(gateway.port, {"model": "tiny", "messages": messages, "max_tokens": 4}, named)
    exchange.wait()
    assert exchange.status == 200, exchange.answer
    return exchange


def chosen(exchange: Exchange) -> str:
    return dict(part.split("=", 1) for part in exchange.answer_headers["x-stoker-route"].split(";"))["decode"]


def conversation(number: int, turns: int) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": f"Agent {number}. " + f"{number} {WORDS} " * 12}]
    for turn in range(turns):
        messages += [{"role": "user", "content": f"{turn} {WORDS}"}, {"role": "assistant", "content": WORDS}]
    return messages[:-1]


@pytest.mark.parametrize("header", [False, True], ids=["without a session", "with"])
def test_two_gateways_send_a_conversation_to_the_same_worker(fleet: RealFleet, second: Process, header: bool) -> None:
    """Turns alternate between two gateways: both know where the prefix is cached, from KV events."""
    gateways = [fleet.gateway, second]
    places = []
    for number in range(8):
        name = {"x_session_affinity": f"session-{number}-{header}"} if header else {}
        seen = []
        for turn in range(1, 4):
            messages = conversation(number + 100 * header, turn)
            exchange = ask(gateways[turn % 2], messages, **name)
            seen.append((chosen(exchange), exchange.usage["prompt_tokens_details"]["cached_tokens"]))
            wait_for(lambda: _know_the_same(gateways))
        assert len({worker for worker, _ in seen}) == 1, seen
        assert all(cached > 0 for _, cached in seen[1:]), seen
        places.append(seen[0][0])
    assert len(set(places)) == 2, "all sessions in one place"


def _know_the_same(gateways: list[Process]) -> bool:
    """Return True if both gateways know every block. The one that routed a request knows at once, the other by events."""
    if any(any(gateway.get("/admin/ledger", ADMIN_TOKEN)["reserved"].values()) for gateway in gateways):
        return False
    return len({gateway.metrics()['stoker_gateway_index_blocks{model="tiny"}'] for gateway in gateways}) == 1


def test_a_gateway_counts_the_work_that_another_one_sent(fleet: RealFleet, second: Process) -> None:
    """The worker tells it: accept, first token and end of a stream through the first gateway."""
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": WORDS}], "stream": True}
    body |= {"max_tokens": 400, "ignore_eos": True}

    def reserved() -> dict[str, int]:
        found: dict[str, int] = second.get("/admin/ledger", ADMIN_TOKEN)["reserved"]
        return found

    assert reserved()["requests"] == 0
    exchange = fleet.ask(body)
    wait_for(lambda: len(exchange.events) > 5)
    seen = reserved()
    assert (seen["requests"], seen["prefill_tokens"]) == (1, 0)  # past its first token
    assert seen["context_tokens"] > 0
    exchange.wait()
    wait_for(lambda: not any(reserved().values()), 5)


def test_a_hanging_worker_is_left_and_its_stream_is_resumed(fleet: RealFleet) -> None:
    """Send SIGSTOP: connections stay open without output."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": WORDS}],
        "max_tokens": 250,
        "ignore_eos": True,
        "seed": 5,
    }
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    undisturbed = fleet.direct(body)
    undisturbed.wait()
    exchange = fleet.ask(body)
    wait_for(lambda: len(exchange.events) > 20)
    worker = fleet.serving_worker()
    with worker.stopped():
        exchange.wait()
        assert exchange.said == undisturbed.said
    fleet.heal()
    wait_for(lambda: not any(fleet.in_flight()["reserved"].values()))


_LONG: dict[str, Any] = {"max_tokens": 250, "ignore_eos": True}
_ANSWER = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 200, "maxLength": 240}},
    "required": ["text"],
}
_MOVED: list[dict[str, Any]] = [
    {
        "stream": True,
        "seed": 3,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _ANSWER}},
    },
    {"stream": True, "temperature": 0, "stream_options": {"include_usage": True}},
    {"stream": True, "seed": 7, "n": 2},
    {"stream": False, "seed": 8},
    {"stream": True, "seed": 9, "logprobs": True, "top_logprobs": 2},
]


def test_a_drained_worker_is_empty_at_once_and_no_client_notices(fleet: RealFleet) -> None:
    """Streams of every kind move with their KV, and give the tokens of an undisturbed worker."""
    bodies = [
        _LONG | more | {"messages": [{"role": "user", "content": f"{i} {WORDS * 8}"}]} for i, more in enumerate(_MOVED)
    ]
    source, target = fleet.workers
    names = [f"127.0.0.1:{worker.port}" for worker in fleet.workers]
    drain(fleet, names[1])
    exchanges = [fleet.ask(bodies[0])]
    wait_for(lambda: len(exchanges[0].events) > 2)  # its grammar is compiled now
    exchanges += [fleet.ask(body) for body in bodies[1:]]
    wait_for(lambda: all(len(one.events) > 2 for one in exchanges if one.body["stream"]))
    with source.stopped(engine=True):  # so that no answer ends before the move begins
        drain(fleet, names[1], on=False)
        wait_for(lambda: usable_workers(fleet.gateway) == 2)
        pulled = target.metrics()["stoker_kv_pulled_tokens_total"]
        draining = subprocess.Popen(
            drain_command(fleet, names[0], "--move", "--wait-s", "60"), stdout=subprocess.PIPE, text=True
        )
        wait_for(lambda: "requests_move" in source.log_path.read_text())
    shown, _ = draining.communicate(timeout=120)
    assert (draining.returncode, "runs no request" in shown) == (0, True), shown
    for one in exchanges:
        one.wait()
    assert target.metrics()["stoker_kv_pulled_tokens_total"] > pulled
    assert fleet.gateway.metrics()['stoker_gateway_moves_total{outcome="with_kv"}'] > 1
    wait_for(lambda: source.is_idle)
    drain(fleet, names[0], on=False)
    wait_for(lambda: usable_workers(fleet.gateway) == 2)
    references = [fleet.direct(body) for body in bodies]
    for one, expected in zip(exchanges, references, strict=True):
        expected.wait()
        assert one.said == expected.said


def drain(fleet: RealFleet, worker: str, *, on: bool = True) -> None:
    path = f"/admin/{'drain' if on else 'undrain'}?worker={worker}"
    headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    request = urllib.request.Request(fleet.gateway.url + path, b"", headers, method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200


def drain_command(fleet: RealFleet, worker: str, *flags: str) -> list[str]:
    token = str(fleet.gateway.log_path.with_name("admin-token"))
    return [STOKER, "drain", worker, *flags, "--url", fleet.gateway.url, "--admin-token-file", token]


def test_workers_register_with_a_secret_and_leave(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a shared secret of some length")
    (tmp_path / "token").write_text(ADMIN_TOKEN)
    secret = ["--secret-file", str(tmp_path / "secret")]
    gateway = Process(
        ["gateway", "--store", "none", "--admin-token-file", str(tmp_path / "token"), *secret],
        tmp_path / "gateway.log",
    )
    with ExitStack() as stack:
        stack.callback(gateway.stop)
        gateway.start()
        serve = ["serve", str(tiny_folder), *WORKER_OPTIONS, "--gateway", gateway.url, *secret]
        workers = [Process(serve, tmp_path / f"worker-{i}.log") for i in range(2)]
        for worker in workers:
            stack.callback(worker.stop)
        starts = [threading.Thread(target=worker.start) for worker in workers]
        for start in starts:
            start.start()
        for start in starts:
            start.join()
        wait_for(lambda: usable_workers(gateway) == 2)
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["tiny"]
        messages: Any = [{"role": "user", "content": "hello"}]
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=5, seed=1)
        chunks = list(
            client.chat.completions.create(model="tiny", messages=messages, max_tokens=5, seed=1, stream=True)
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="nobody", messages=messages)

        # A worker that is told to end, such as on a spot instance, gives its streams to the other one.
        body = {"model": "tiny", "messages": messages, "max_tokens": 250, "ignore_eos": True, "seed": 5, "stream": True}
        moved = Exchange(gateway.port, body)
        wait_for(lambda: len(moved.events) > 2)
        source = RealFleet(workers, gateway, tmp_path).serving_worker()
        assert source.process is not None
        with source.stopped(engine=True):  # so that the stream does not end before it moves
            source.process.send_signal(signal.SIGTERM)
            wait_for(lambda: "requests_move" in source.log_path.read_text())
        assert source.process.wait(60) == 0
        moved.wait()
        again = Exchange(gateway.port, body)
        again.wait()
        assert moved.said == again.said
        assert gateway.metrics()['stoker_gateway_moves_total{outcome="with_kv"}'] == 1
        wait_for(lambda: usable_workers(gateway) == 1)

        for worker in workers:
            assert worker.process is not None
            worker.process.send_signal(signal.SIGTERM)
        wait_for(lambda: not gateway.get("/admin/fleet", ADMIN_TOKEN)["workers"])
    assert "a shared secret" not in (tmp_path / "gateway.log").read_text()
    assert json.loads((tmp_path / "gateway.log").read_text().splitlines()[0])

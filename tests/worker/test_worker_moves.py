"""Requests that their gateway moves to another worker, and the duty of a worker: its role and its drains."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake_engine import FakeService, Script, byte_text
from http_server import Answer, Server, run_server, wait_for
from signing import signed
from test_resume import by_seed

from stoker.gateway.path.resume import StokerStream, TokenMemory
from stoker.worker.config import HttpConfig
from stoker.worker.identity import Identity
from stoker.worker.state import ServerState

CHAT = "/v1/chat/completions"
PATHS = {
    CHAT: {"messages": [{"role": "user", "content": "Say hello"}]},
    "/v1/completions": {"prompt": "Say hello", "max_tokens": 64},
    "/v1/responses": {"input": "Say hello"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Say hello"}], "max_tokens": 64},
}
OURS = {"X-Request-Id": "r-1", "x-stoker-stream": "1", "x-stoker-move": "g-1"}
SECRET = "a secret of the fleet"


def make_server(secret: str | None = None) -> Server:
    text = byte_text()
    identity = Identity() if secret is None else Identity(secret=secret)
    return Server(FakeService(text.tokenizer), text, HttpConfig(served_names=("tiny",)), identity=identity)


@pytest.fixture
def worker() -> Iterator[Server]:
    server = make_server()
    stop = run_server(server)
    yield server
    stop()


def moved(worker: Server, path: str, body: dict[str, Any], num_choices: int = 1, **headers: str) -> Answer:
    """Send a request, move it after its first chunks, and return its answer."""
    let_go = threading.Event()
    worker.service.script = Script(by_seed, let_go=let_go, cached_tokens=4)
    before = worker.service.sent_chunks
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(worker.send, path, body, **(OURS | headers))
        wait_for(lambda: worker.service.sent_chunks >= before + num_choices)
        asked = worker.send("/stoker/move", {"names": ["g-1", "unknown"]})
        assert asked.status == 202
        let_go.set()
        return answer.result(60)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_moved_stream_continues_elsewhere_with_the_same_bytes(worker: Server, path: str, num_choices: int) -> None:
    if num_choices > 1 and path not in (CHAT, "/v1/completions"):
        return
    body = PATHS[path] | {"stream": True, "seed": 5} | ({"n": num_choices} if num_choices > 1 else {})
    memory = TokenMemory()
    counts = path in ("/v1/responses", "/v1/messages")
    first = StokerStream(memory, counts_events=counts)
    shown = first.push(moved(worker, path, body, num_choices).body)
    assert not first.is_complete
    ticket = json.loads(memory.notes.ticket or b"")
    leases = [one["remote_request_id"] for one in ticket.get("choices", [ticket])]
    assert leases == list(worker.service.moved.values())
    assert len(set(leases)) == num_choices

    memory.notes.ticket = None
    worker.service.script = Script(by_seed, cached_tokens=4)
    resume = json.loads(memory.resume_field(num_choices))
    again = body | {"resume": resume, "kv_transfer_params": ticket}
    second = StokerStream(memory, counts_events=counts)
    shown += second.push(worker.send(path, again, **OURS).body)
    assert second.is_complete
    assert [request.ticket.lease_id for request in worker.service.requests[num_choices:] if request.ticket] == leases

    # An undisturbed answer with the same time in it.
    begins = {"resume": {"created": resume["created"], "choices": [{}] * num_choices}}
    whole = StokerStream(TokenMemory()).push(worker.send(path, body | begins, **OURS).body)
    assert sorted(shown.split(b"\n\n")) == sorted(whole.split(b"\n\n"))


@pytest.mark.parametrize("path", PATHS)
def test_a_moved_answer_that_is_not_streamed_is_replaced_by_its_notes(worker: Server, path: str) -> None:
    body = PATHS[path] | {"seed": 5}
    answer = moved(worker, path, body)
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    memory = TokenMemory()
    assert StokerStream(memory).push(answer.body) == b""
    assert memory.notes.ticket is not None
    assert (memory.num_tokens, memory.cached_tokens) == (1, 4)
    resume = json.loads(memory.resume_field(1))
    worker.service.script = Script(by_seed)
    continued = worker.send(path, body | {"resume": resume}, **OURS)
    whole = worker.send(path, body | {"resume": {"created": resume["created"], "choices": [{}]}}, **OURS)
    assert continued.json == whole.json | ({"usage": continued.json["usage"]} if "usage" in whole.json else {})
    assert continued.json["usage"].get("completion_tokens") == whole.json["usage"].get("completion_tokens")


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_has_no_token_yet_moves_without_kv(worker: Server, stream: bool) -> None:
    let_go = threading.Event()
    worker.service.script = Script(by_seed, let_go=let_go, holds_first=True)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(worker.send, CHAT, PATHS[CHAT] | {"seed": 5, "stream": stream}, **OURS)
        wait_for(lambda: bool(worker.service.requests))
        assert worker.send("/stoker/move", {"names": ["g-1"]}).json == {"moving": 1}
        let_go.set()
        lines = answer.result(60).body.split(b"\n")
    (note,) = [line for line in lines if line]
    assert json.loads(note.removeprefix(b":k "))["choices"] == [None]


def test_requests_without_a_name_stay(worker: Server) -> None:
    body = PATHS[CHAT] | {"seed": 5}
    headers = {"X-Request-Id": "r-1"}
    worker.service.script = Script(by_seed)
    assert worker.send("/stoker/move", {"names": ["g-1"]}).json == {"moving": 0}
    assert worker.send(CHAT, body, **headers).json["choices"][0]["finish_reason"]
    # A stream without notes cannot be continued by anybody.
    let_go = threading.Event()
    worker.service.script = Script(by_seed, let_go=let_go)
    before = worker.service.sent_chunks
    with ThreadPoolExecutor(1) as pool:
        named = {"x-stoker-move": "g-1"}
        answer = pool.submit(worker.send, CHAT, body | {"stream": True}, **named)
        wait_for(lambda: worker.service.sent_chunks > before)
        assert worker.send("/stoker/move", {"names": ["g-1"]}).json == {"moving": 0}
        let_go.set()
        assert answer.result(60).events[-1].is_done


@pytest.mark.parametrize("body", [{}, {"names": "g-1"}, {"names": ["a b"]}, {"names": ["x" * 161]}, {"more": 1}, []])
def test_a_wrong_move_request_is_refused(worker: Server, body: Any) -> None:
    assert worker.send("/stoker/move", body).status == 400


def test_a_worker_without_a_secret_keeps_its_duty(worker: Server) -> None:
    assert worker.send("/stoker/duty", {"role": "prefill"}).status == 403
    assert worker.context.identity.role == "unified"


def test_a_worker_changes_its_role_and_drains() -> None:
    server = make_server(SECRET)
    stop = run_server(server)
    try:

        def change(body: dict[str, Any]) -> Answer:
            headers = signed(server.url, SECRET, "/stoker/duty", json.dumps(body).encode())
            return server.send("/stoker/duty", body, **headers)

        assert change({"role": "decode"}).json == {"role": "decode", "draining": False, "moving": False}
        info = server.send("/stoker/worker", **signed(server.url, SECRET, "/stoker/worker"))
        assert info.json["role"] == "decode"
        assert change({"draining": True, "moving": True}).json["moving"]
        assert server.send("/ready").status == 503
        assert change({"draining": False}).json == {"role": "decode", "draining": False, "moving": False}
        assert server.send("/ready").status == 200
        assert change({"role": "chief"}).status == 400
        assert server.send("/stoker/duty", {"role": "prefill"}).status == 401
    finally:
        stop()


def test_a_drain_ends_when_its_last_reason_ends() -> None:
    state = ServerState(5.0)
    state.begin_drain("operator")
    state.begin_drain("model", moves=True)
    assert (state.draining, state.moving) == (True, True)
    state.end_drain("model")
    assert (state.draining, state.moving) == (True, False)
    state.end_drain("operator")
    assert not state.draining

"""Real processes that are killed, drained, starved and sent bad input: every request is answered, nothing leaks."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from real import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    STOKER,
    Answer,
    RealServer,
    children,
    is_alive,
    serving,
    serving_together,
    wait_for,
)
from sse_reader import SseReader
from stopping import stopped

# In float64 the batch does not change a sampled token, so answers can be compared exactly.
FAST = ("--threads", "1", "--dtype", "float64")
LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 6000, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def shared(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server with two rows, so that a third request waits. Tests leave it idle."""
    log_path = tmp_path_factory.mktemp("log") / "shared"
    with serving(tiny_folder, log_path, *FAST, "--max-rows", "2", "--kv-blocks", "2000") as server:
        yield server
    assert "Traceback" not in log_path.read_text()


@pytest.fixture
def server(shared: RealServer) -> Iterator[RealServer]:
    wait_for(lambda: shared.is_ready and shared.is_idle)
    yield shared
    wait_for(lambda: shared.is_idle)


@pytest.fixture(scope="module")
def spares(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealServer]]:
    logs = tmp_path_factory.mktemp("log")
    options = (*FAST, "--kv-blocks", "2000", "--engine-silent-s", "300")  # a test stops an engine for a while
    with serving_together(tiny_folder, *((logs / str(number), options) for number in range(3))) as servers:
        yield list(servers)


@pytest.fixture
def own(spares: list[RealServer]) -> RealServer:
    """A server that its test ends. Each of the three tests that use it gets its own."""
    return spares.pop()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as threads:
        yield threads


def post(server: RealServer, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request on a bare socket. The caller may read the answer, or not."""
    data = json.dumps(body).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", server.port))
    client.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return client


def num_waiting(server: RealServer) -> float:
    return server.metrics()["stoker_waiting_sequences"]


# ---- the engine dies


def test_a_killed_engine_ends_every_request_at_once_and_is_restarted(
    server: RealServer, pool: ThreadPoolExecutor
) -> None:
    before = server.complete("Hello", max_tokens=20, seed=3, ignore_eos=True).text
    restarts = server.metrics()["stoker_engine_restarts_total"]
    chat = server.stream(COMPLETIONS, LONG)
    responses = server.stream(
        RESPONSES, {"input": "Tell me", "max_output_tokens": 6000, "temperature": 1, "ignore_eos": True}
    )
    queued: list[Future[Answer]] = [
        pool.submit(server.complete, **LONG | {"prompt": "Me too", "stream": stream}) for stream in (False, True)
    ]
    wait_for(lambda: len(chat.events) > 5 and len(responses.events) > 8 and num_waiting(server) == 2)

    os.kill(server.engine_pid, signal.SIGKILL)
    for stream in (chat, responses):
        stream.wait_end()
        assert not stream.is_done
    assert chat.last_error["code"] == "engine_died"
    assert chat.last_error["type"] == "server_error"
    assert responses.events[-1].event == "response.failed"
    for answer in (future.result(60) for future in queued):
        assert (answer.status, answer.error["code"]) == (503, "engine_died")
        assert answer.headers["Retry-After"] == "1"

    early = server.complete("Hello", max_tokens=5)
    assert (early.status, early.error["code"]) == (503, "engine_starting")
    assert int(early.headers["Retry-After"]) >= 1
    assert server.send("/health").json["engine"] == "starting"
    assert "stoker_running_sequences" not in server.metrics(), "what a dead engine said is no longer so"
    wait_for(lambda: server.is_ready, 120)
    assert server.complete("Hello", max_tokens=20, seed=3, ignore_eos=True).text == before
    assert server.metrics()["stoker_engine_restarts_total"] == restarts + 1
    assert server.log.count('"engine_died"') >= 1


def test_a_stopped_engine_is_killed_and_restarted_like_one_that_died(server: RealServer) -> None:
    before = server.complete("Hello", max_tokens=20, seed=3, ignore_eos=True).text
    engine = server.engine_pid
    stream = server.stream(COMPLETIONS, LONG)
    wait_for(lambda: len(stream.events) > 5)
    os.kill(engine, signal.SIGSTOP)
    stream.wait_end()
    assert stream.last_error["code"] == "engine_died"
    wait_for(lambda: not is_alive(engine))
    wait_for(lambda: server.is_ready, 120)
    assert server.engine_pid != engine
    assert server.complete("Hello", max_tokens=20, seed=3, ignore_eos=True).text == before
    assert server.log.count('"engine_hangs"') == 1


def test_no_engine_outlives_its_killed_server_even_if_it_is_stopped(own: RealServer) -> None:
    engine = own.engine_pid
    stream = own.stream(COMPLETIONS, LONG)
    wait_for(lambda: len(stream.events) > 5)
    os.kill(engine, signal.SIGSTOP)
    own.process.kill()
    wait_for(lambda: not is_alive(engine))
    stream.wait_end()
    assert not stream.is_done


# ---- the server is told to stop


def test_sigterm_finishes_running_requests_and_refuses_new_ones(own: RealServer) -> None:
    engine = own.engine_pid
    lone = own.complete("Once", max_tokens=300, seed=5, ignore_eos=True).text
    stream = own.stream(COMPLETIONS, {"prompt": "Once", "max_tokens": 300, "seed": 5, "ignore_eos": True})
    wait_for(lambda: len(stream.events) > 5)
    os.kill(engine, signal.SIGTERM)  # systemd and Slurm signal all processes of a service
    with stopped(engine):  # running requests do not end before the new one is refused
        own.process.send_signal(signal.SIGTERM)
        wait_for(lambda: own.send("/health").json["draining"])
        refused = own.complete("Hello", max_tokens=5)
        assert (refused.status, refused.error["code"]) == (503, "draining")
        assert int(refused.headers["Retry-After"]) >= 1
        assert own.send("/ready").status == 503
        assert not stream.is_done
    stream.wait_end()
    assert stream.is_done
    assert stream.text == lone
    assert own.process.wait(60) == 0
    wait_for(lambda: not is_alive(engine))
    assert "Traceback" not in own.log


def test_a_second_sigterm_stops_at_once(own: RealServer) -> None:
    engine = own.engine_pid
    stream = own.stream(COMPLETIONS, LONG)
    wait_for(lambda: len(stream.events) > 5)
    own.process.send_signal(signal.SIGTERM)
    wait_for(lambda: own.send("/health").json["draining"])
    own.process.send_signal(signal.SIGTERM)
    own.process.wait(60)
    stream.wait_end()
    assert not stream.is_done, "it was waited for"
    assert stream.last_error["code"] == "engine_died"
    assert not is_alive(engine)
    assert "Traceback" not in own.log


def test_ctrl_c_during_the_start_ends_the_server(tiny_folder: Path) -> None:
    process = subprocess.Popen(
        [STOKER, "serve", str(tiny_folder), "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: bool(children(process.pid)))
    (engine,) = children(process.pid)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    wait_for(lambda: not is_alive(engine))


# ---- clients that disconnect or do not read


# Each with fewer tokens than the whole answer would take.
PHASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "prefill": (8000, COMPLETIONS, {"prompt": [7] * 7000, "max_tokens": 1100, "ignore_eos": True, "stream": True}),
    "decode": (6000, COMPLETIONS, LONG),
    "three": (18_000, COMPLETIONS, LONG | {"n": 3}),
    "streams": (12_000, COMPLETIONS, LONG | {"n": 2, "stream": True}),
    "grammar": (
        3000,
        CHAT,
        {
            "messages": [{"role": "user", "content": "hi"}],
            "response_format": {"type": "regex", "regex": "[a-z ]{5000,}"},
            "max_tokens": 3000,
        },
    ),
}


@pytest.mark.parametrize("delay_s", [0.0, 0.03, 0.4])
@pytest.mark.parametrize("phase", PHASES)
def test_a_disconnect_frees_the_blocks(server: RealServer, phase: str, delay_s: float) -> None:
    num_tokens, path, body = PHASES[phase]
    before = server.metrics()["stoker_computed_tokens_total"]
    client = post(server, path, body | {"cache_salt": str(delay_s)})  # its blocks are not shared with the other delays
    time.sleep(delay_s)
    client.close()
    wait_for(lambda: server.is_idle)
    assert server.metrics()["stoker_computed_tokens_total"] - before < num_tokens, "it ran to its end"


def test_a_disconnect_of_a_waiting_request_removes_it(server: RealServer) -> None:
    running = [server.stream(COMPLETIONS, LONG | {"seed": seed}) for seed in range(2)]
    waiting = post(server, COMPLETIONS, LONG | {"seed": 2})
    wait_for(lambda: num_waiting(server) == 1)
    waiting.close()
    wait_for(lambda: num_waiting(server) == 0)
    for stream in running:
        assert stream.ended_s is None, "it ran when there was room"
        stream.leave()
    wait_for(lambda: server.is_idle)


def test_a_disconnect_in_the_middle_of_a_body_ends_the_request(server: RealServer) -> None:
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
    wait_for(lambda: server.metrics()["stoker_running_requests"] == 1)
    client.close()
    wait_for(lambda: server.is_idle)


def test_a_slow_reader_does_not_delay_others(server: RealServer) -> None:
    ask = {"prompt": "Hello", "max_tokens": 40, "seed": 9, "ignore_eos": True}
    lone = server.complete(**ask).text
    slow = post(server, COMPLETIONS, LONG | {"stream": True, "logprobs": 20, "max_tokens": 2000})
    wait_for(lambda: server.metrics()["stoker_running_sequences"] == 1)
    for _ in range(3):
        assert server.complete(**ask).text == lone
    slow.close()
    wait_for(lambda: server.is_idle)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_ends_at_its_deadline(server: RealServer, stream: bool) -> None:
    started_s = time.monotonic()
    whole = server.complete(**LONG | {"timeout_s": 0.5, "stream": stream})
    assert time.monotonic() - started_s > 0.4
    if whole.status == 200:
        assert stream
        *events, last = SseReader().push(whole.body)
        assert json.loads(last.data)["error"]["code"] == "deadline_exceeded"
        assert events
        assert not any(event.is_done for event in events)
    else:  # also of a stream, if the machine stalled before its first token
        assert (whole.status, whole.error["code"]) == (504, "deadline_exceeded")
    wait_for(lambda: server.is_idle)


def test_a_waiting_request_ends_at_its_deadline(server: RealServer) -> None:
    running = [server.stream(COMPLETIONS, LONG | {"seed": seed}) for seed in range(2)]
    late = server.complete("Hello", max_tokens=5, timeout_s=0.3)
    assert (late.status, late.error["code"]) == (504, "deadline_exceeded")
    for stream in running:
        stream.leave()


# ---- more requests than capacity


@pytest.fixture(scope="module")
def little(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server with KV for 192 tokens. The second of its two tests ends it."""
    log_path = tmp_path_factory.mktemp("log") / "little"
    with serving(tiny_folder, log_path, *FAST, "--kv-blocks", "12", "--step-tokens", "40") as server:
        yield server


def test_many_requests_in_little_kv_have_the_answers_of_single_requests(
    little: RealServer, pool: ThreadPoolExecutor
) -> None:
    refused = little.complete("Hello", max_tokens=192)
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    assert "192" in refused.error["message"]
    assert "193" in refused.error["message"]
    rng = random.Random(4)
    shared = [rng.randrange(100, 40000) for _ in range(40)]
    asks = [
        {
            "prompt": shared[: rng.randint(1, 40)] + [rng.randrange(100, 40000) for _ in range(rng.randint(1, 30))],
            "max_tokens": rng.randint(20, 80),
            "seed": seed,
            "ignore_eos": True,
            "frequency_penalty": 0.5 * (seed % 2),
        }
        for seed in range(8)
    ]
    lone = [little.complete(**ask).text for ask in asks]
    together = list(pool.map(lambda ask: little.complete(**ask).text, asks))
    assert together == lone
    assert little.metrics()["stoker_preemptions_total"] > 0
    wait_for(lambda: little.is_idle)
    # A request that needs all of it still works.
    whole = little.complete("Hello", max_tokens=191, ignore_eos=True, seed=1)
    assert whole.json["usage"]["completion_tokens"] == 191


def test_ctrl_c_ends_an_idle_server(little: RealServer) -> None:
    engine = little.engine_pid
    little.process.send_signal(signal.SIGINT)
    assert little.process.wait(60) == 0
    assert not is_alive(engine)
    assert "Traceback" not in little.log


# ---- bad input


USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": 5}}}
GRAMMARS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "regex", "regex": "(unclosed"}}, "response_format.regex"),
    ({"response_format": {"type": "grammar", "grammar": "root ::= ("}}, "response_format.grammar"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
        "response_format.json_schema.schema",
    ),
    ({"guided_json": {"type": 5}}, "guided_json"),
    ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json"),
    ({"guided_json": {"$ref": "#"}}, "guided_json"),
    ({"guided_json": {"enum": []}}, "guided_json"),
    ({"guided_regex": "[z-a]"}, "guided_regex"),
    ({"guided_regex": "a\0b"}, "guided_regex"),
    ({"guided_grammar": "nonsense"}, "guided_grammar"),
    ({"structured_outputs": {"regex": "a{3,1}"}}, "structured_outputs.regex"),
    ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), GRAMMARS, ids=[str(number) for number in range(len(GRAMMARS))])
def test_an_invalid_grammar_is_refused(server: RealServer, fields: dict[str, Any], param: str, stream: bool) -> None:
    answer = server.send(CHAT, {"messages": USER, "max_tokens": 5, "stream": stream} | fields)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert answer.error["type"] == "invalid_request_error"
    assert ".cc:" not in answer.error["message"]


def test_a_grammar_may_end_before_min_tokens(server: RealServer) -> None:
    answer = server.send(CHAT, {"messages": USER, "max_tokens": 30, "min_tokens": 20, "guided_regex": "yes"})
    assert answer.status == 200
    assert answer.json["choices"][0]["message"]["content"] == "yes"


def test_a_grammar_that_slows_every_step_ends_its_own_answer(server: RealServer) -> None:
    ask = {"messages": USER, "max_tokens": 2000, "guided_regex": "(([a-z]*){30}){30}"}
    answer = server.send(CHAT, ask)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_grammar", "guided_regex")
    assert "too long" in answer.error["message"]


def test_a_slow_grammar_does_not_delay_other_requests(server: RealServer, pool: ThreadPoolExecutor) -> None:
    ask = {"messages": USER, "max_tokens": 5}
    many = {"enum": [f"{number:x} is one of very many" for number in range(12_000)]}  # half a minute
    slow = pool.submit(server.send, CHAT, ask | {"guided_json": many, "timeout_s": 5})
    wait_for(lambda: num_waiting(server) == 1)
    started_s = time.monotonic()
    assert server.send(CHAT, ask | {"guided_regex": "ab"}).status == 200
    assert time.monotonic() - started_s < 10
    late = slow.result()
    assert (late.status, late.error["code"]) == (504, "deadline_exceeded")


def test_a_prompt_of_ten_megabytes_is_refused_and_ten_megabytes_of_spaces_are_not(server: RealServer) -> None:
    answer = server.send(CHAT, {"messages": [{"role": "user", "content": "word " * 2_000_000}]})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert "8192" in answer.error["message"]
    padded = server.send(COMPLETIONS, b'{"prompt": "Hello", "max_tokens": 3' + b" " * (10 << 20) + b"}")
    assert padded.status == 200


BAD: list[tuple[str, Any]] = [
    (CHAT, b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}'),
    (CHAT, b"\xc3\x28"),
    (CHAT, b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}'),
    (CHAT, b'{"messages": '),
    (CHAT, b"[" * 100_000),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "wizard", "content": "hi"}]}),
    (CHAT, {"messages": [{"role": "tool", "content": "x", "tool_call_id": "c1"}]}),
    (CHAT, {"messages": USER, "model": "gpt-9"}),
    (CHAT, {"messages": USER, "max_tokens": 10**30}),
    (CHAT, {"messages": USER, "max_tokens": 9000}),
    (CHAT, {"messages": USER, "max_tokens": -2}),
    (CHAT, {"messages": USER, "temperature": -1e308}),
    (CHAT, {"messages": USER, "n": 10**9}),
    (CHAT, {"messages": USER, "logit_bias": {"999999": 1}}),
    (CHAT, {"messages": USER, "tools": "none"}),
    (CHAT, {"messages": USER, "tool_choice": {"type": "function", "function": {"name": "absent"}}}),
    (CHAT, {"messages": USER, "response_format": {"type": "regex", "regex": "("}}),
    (CHAT, {"messages": USER, "guided_json": {"type": 5}, "stream": True}),
    (COMPLETIONS, {"prompt": [10**6]}),
    (COMPLETIONS, {"prompt": [5] * 9000}),
    (COMPLETIONS, {"prompt": ""}),
    (COMPLETIONS, {"prompt": "x", "stop": [""]}),
    (RESPONSES, {"input": []}),
    (RESPONSES, {"input": "x", "previous_response_id": "r"}),
]


def test_bad_requests_do_not_affect_good_ones(server: RealServer, pool: ThreadPoolExecutor) -> None:
    asks = [{"prompt": f"Story {i}", "max_tokens": 30, "seed": i, "ignore_eos": True} for i in range(8)]
    lone = [server.complete(**ask).text for ask in asks]
    logged = len(server.log.splitlines())
    good = [pool.submit(server.complete, **ask) for ask in asks[:4]]
    bad = [pool.submit(server.send, path, body) for path, body in BAD + BAD]
    good += [pool.submit(server.complete, **ask) for ask in asks[4:]]
    for future, (path, body) in zip(bad, BAD + BAD, strict=True):
        answer = future.result()
        assert answer.status in (400, 404), (path, body)
        assert answer.error["message"]
    assert [future.result().text for future in good] == lone
    wait_for(lambda: len(server.log.splitlines()) >= logged + len(bad) + len(good))
    lines = [json.loads(line) for line in server.log.splitlines()[logged:]]
    assert sum(line["event"] == "request" and line["status"] in (400, 404) for line in lines) == len(bad)
    assert sum(line["event"] == "request" and line["status"] == 200 for line in lines) == len(good)
    assert len({line["request"] for line in lines if line["event"] == "request"}) == len(bad) + len(good)


# ---- a server that cannot start


def failed_start(*arguments: str) -> str:
    """Return its output. It must end with exit code 2 and a readable message."""
    done = subprocess.run([STOKER, "serve", *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_a_port_in_use_is_an_error_at_start(server: RealServer, tiny_folder: Path) -> None:
    said = failed_start(str(tiny_folder), "--port", str(server.port), *FAST)
    assert said.startswith("stoker: ")
    assert str(server.port) in said
    assert "in use" in said


# Found by the server, by both processes, and by the engine.
SPOILED = [
    ("tokenizer.json", "cut"),
    ("config.json", "missing"),
    ("config.json", "unknown"),
    ("model.safetensors", "cut"),
]
ALSO_SPOILED = [("config.json", "cut"), ("tokenizer_config.json", "cut"), ("model.safetensors", "missing")]


def spoil(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path.write_text(path.read_text().replace("LlamaForCausalLM", "OddForCausalLM"))


@pytest.mark.parametrize("cases", [SPOILED, pytest.param(ALSO_SPOILED, marks=pytest.mark.slow)], ids=["some", "others"])
def test_missing_or_corrupt_model_files_are_an_error_at_start(
    cases: list[tuple[str, str]], tiny_folder: Path, tmp_path: Path
) -> None:
    def start(case: tuple[str, str]) -> str:
        name, how = case
        folder = tmp_path / f"{name}-{how}"
        shutil.copytree(tiny_folder, folder)
        spoil(folder / name, how)
        return failed_start(str(folder), "--port", "0", "--offline", *FAST)

    with ThreadPoolExecutor(2) as threads:
        for (name, how), said in zip(cases, threads.map(start, cases), strict=True):
            assert said.startswith("stoker: "), (name, how, said)
            assert name.removeprefix("model") in said, (name, how, said)
            assert how != "unknown" or "OddForCausalLM" in said

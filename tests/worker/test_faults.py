"""Clients that disconnect or do not read, engines that die, servers that drain: nothing hangs or is left running."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from http_server import Answer, Server, wait_for

from stoker.sched.request import GenerateRequest


def ask(server: Server, **fields: Any) -> socket.socket:
    """Send a request on a bare socket. The caller may read the answer, or not."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()
    client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": False}, {"stream": True, "n": 3}, {"n": 3}], ids=str)
def test_a_disconnect_cancels_the_sequences(server: Server, fields: dict[str, Any]) -> None:
    server.say("blah ", endless=True, delay_s=0.002)
    client = ask(server, **fields)
    wait_for(lambda: server.service.sent_chunks > 20)
    client.close()
    wait_for(lambda: len(server.service.cancelled) == fields.get("n", 1))
    wait_for(lambda: server.state.num_running == 0)
    assert server.service.running == 0


def test_a_disconnect_before_the_first_token_cancels_the_sequence(server: Server) -> None:
    server.say("late", delay_s=30)
    client = ask(server, stream=True)
    wait_for(lambda: server.service.running == 1)
    client.close()
    wait_for(lambda: server.service.running == 0)
    assert len(server.service.cancelled) == 1


def test_a_disconnect_while_the_prompt_is_tokenized_starts_no_sequence(start_server: Callable[..., Server]) -> None:
    server = start_server(inline_chars=0, text_threads=1)
    encode, let_go = server.text.tokenizer.encode, threading.Event()

    def slow(*arguments: Any) -> list[int]:
        let_go.wait(120)
        return encode(*arguments)

    server.text.tokenizer.encode = slow  # type: ignore[method-assign]
    client = ask(server)
    wait_for(lambda: server.state.num_running == 1)
    client.close()
    wait_for(lambda: server.state.num_running == 0)
    let_go.set()
    assert server.service.requests == []


def test_half_a_request_does_not_affect_others(server: Server) -> None:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
    wait_for(lambda: server.state.num_running == 1)
    client.close()
    wait_for(lambda: server.state.num_running == 0)
    assert server.chat().status == 200


def test_a_client_that_does_not_read_is_dropped(start_server: Callable[..., Server]) -> None:
    server = start_server(client_stall_s=0.3)
    server.say("x" * 100, endless=True, chunk_tokens=100)
    client = ask(server, stream=True, logprobs=True, top_logprobs=20)  # 150 KB per chunk, to fill the buffers
    wait_for(lambda: len(server.service.cancelled) == 1)
    wait_for(lambda: server.state.num_running == 0)
    # Back-pressure: the engine can run ahead only by what the buffers hold.
    at_rest = server.service.sent_chunks
    time.sleep(0.1)
    assert server.service.sent_chunks == at_rest
    client.close()


def test_a_slow_client_gets_everything(server: Server) -> None:
    server.say("0123456789" * 100, chunk_tokens=10)
    client = ask(server, stream=True)
    received = b""
    while b"[DONE]" not in received:
        received += client.recv(1000)
        time.sleep(0.001)
    assert received.count(b'"content":"0123456789"') == 100
    client.close()


def test_a_client_that_reads_late_gets_everything(server: Server) -> None:
    text = "0123456789" * 190
    server.say(text, chunk_tokens=50)
    client = ask(server, stream=True, n=4, logprobs=True, top_logprobs=20)  # 12 MB: more than the buffers hold
    wait_for(lambda: server.service.sent_chunks > 40)
    time.sleep(0.3)
    assert server.service.running  # waits, and is not dropped
    with client, http.client.HTTPResponse(client) as answer:
        answer.begin()
        chunks = Answer(answer.status, {}, answer.read()).chunks
    said = [""] * 4
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        said[choice["index"]] += choice["delta"].get("content") or ""
    assert said == [text] * 4


def test_a_client_of_http_1_0_gets_events_without_chunked_encoding(server: Server) -> None:
    body = b'{"prompt": "hi", "stream": true}'
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        received = b""
        while data := client.recv(4096):
            received += data
    head, _, events = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    said = Answer(200, {}, events).chunks
    assert "".join(chunk["choices"][0]["text"] for chunk in said) == "Hello, world"
    assert b"".join(b"data: " + event.data + b"\n\n" for event in Answer(200, {}, events).events) == events


def test_other_streams_continue_while_a_long_prompt_is_tokenized(start_server: Callable[..., Server]) -> None:
    server = start_server(inline_chars=100, text_threads=1)
    encode, let_go, is_late = server.text.tokenizer.encode, threading.Event(), threading.Event()

    def slow(text: str, *arguments: Any) -> list[int]:
        if "long" in text and not let_go.wait(30):
            is_late.set()
        return encode(text, *arguments)

    server.text.tokenizer.encode = slow  # type: ignore[method-assign]
    client = ask(server, messages=[{"role": "user", "content": "long" * 100}])
    wait_for(lambda: server.state.num_running == 1)
    assert server.chat("hi").status == 200
    assert not is_late.is_set(), "the short one waited for the long one"
    let_go.set()
    client.close()


def test_an_engine_death_before_the_first_byte_is_a_503(server: Server) -> None:
    server.say(dies_after=0)
    for stream in (False, True):
        answer = server.chat(stream=stream)
        assert (answer.status, answer.error["code"]) == (503, "engine_died")
        assert answer.headers["Retry-After"] == "1"
    server.say(dies_after=2)
    assert server.chat(n=2).status == 503
    assert server.service.running == 0


@pytest.mark.parametrize("n", [1, 3])
def test_an_engine_death_in_a_stream_is_an_error_event(server: Server, n: int) -> None:
    server.say("Hello, world", dies_after=4)
    answer = server.chat(stream=True, n=n)
    assert answer.status == 200
    error = answer.chunks[-1]["error"]
    assert (error["code"], error["type"]) == ("engine_died", "server_error")
    assert not any(event.is_done for event in answer.events)
    assert server.service.running == 0
    assert server.state.num_running == 0


def test_a_failed_response_stream_ends_with_response_failed(server: Server) -> None:
    server.say("Hello", dies_after=2)
    events = server.send("/v1/responses", {"input": "hi", "stream": True}).events
    last = json.loads(events[-1].data)
    assert (events[-1].event, last["type"], last["response"]["status"]) == ("response.failed",) * 2 + ("failed",)
    assert last["response"]["error"]["message"]


def test_an_unexpected_error_is_a_500_without_details(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: GenerateRequest) -> str:
        raise ZeroDivisionError("a secret")

    server.say(broken)
    with caplog.at_level(logging.INFO, "stoker.worker"):
        for n in (1, 2):
            answer = server.chat(n=n)
            assert (answer.status, answer.error["code"]) == (500, "internal_error")
            assert b"secret" not in answer.body
        wait_for(lambda: len(caplog.records) == 2)
    assert all(record.exc_info and record.getMessage() == "request_failed" for record in caplog.records)
    server.say("fine")
    assert server.chat().status == 200


def test_overload_answers_contain_retry_after(server: Server) -> None:
    server.say(overloaded=True)
    for fields in ({}, {"stream": True}, {"n": 2}):
        answer = server.chat(**fields)
        assert (answer.status, answer.error["code"], answer.headers["Retry-After"]) == (503, "overloaded", "3")


def test_a_drain_refuses_new_requests_and_finishes_running_ones(server: Server) -> None:
    let_go = threading.Event()
    server.say("Hello, world", let_go=let_go)
    client = ask(server, stream=True)
    wait_for(lambda: server.service.sent_chunks > 0)
    assert server.send("/ready").status == 200
    server.loop.call_soon_threadsafe(server.state.begin_drain)
    wait_for(lambda: server.send("/ready").status == 503)
    refused = server.chat()
    assert (refused.status, refused.error["code"], refused.headers["Retry-After"]) == (503, "draining", "5")
    assert server.send("/health").json["draining"] is True
    idle = threading.Event()
    server.loop.call_soon_threadsafe(
        lambda: server.loop.create_task(server.state.wait_idle()).add_done_callback(lambda _: idle.set())
    )
    assert server.send("/health").json["draining"] is True  # again: the event loop has run
    assert not idle.is_set()
    let_go.set()
    received = b""
    while b"[DONE]" not in received:
        received += client.recv(4096)
    assert received.count(b'"content":') == len("Hello, world")
    assert idle.wait(60)
    client.close()


def test_health_while_the_engine_restarts(server: Server) -> None:
    server.service.ready = False
    assert server.send("/health").json["engine"] == "starting"
    assert server.send("/ready").status == 503
    assert server.chat().status == 503
    server.service.ready = True
    assert server.send("/ready").status == 200


def test_request_ids(server: Server) -> None:
    assert server.chat().headers["X-Request-Id"].startswith("req_")
    assert server.send("/health", X_Request_Id="abc-1").headers["X-Request-Id"] == "abc-1"
    assert server.send("/v1/nothing", X_Request_Id="abc-2").headers["X-Request-Id"] == "abc-2"
    assert server.send("/health", X_Request_Id="x" * 200).headers["X-Request-Id"].startswith("req_")


def test_each_request_is_logged_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "stoker.worker"):
        server.say("Hello", cached_tokens=16)
        server.chat(stream=True)
        server.chat(n=0)
        server.say(dies_after=1)
        server.chat(stream=True)
        server.say("x", endless=True, delay_s=0.01)
        client = ask(server, stream=True)
        wait_for(lambda: server.service.running == 1)
        client.close()
        server.send("/health")
        wait_for(lambda: len(caplog.records) == 4)
        time.sleep(0.05)
    lines = [record.fields for record in caplog.records]
    assert [line["status"] for line in lines] == [200, 400, 503, 499]
    assert (lines[0]["generated_tokens"], lines[0]["cached_tokens"]) == (6, 16)
    assert lines[0]["ttft_ms"] <= lines[0]["ms"]
    assert (lines[1]["code"], lines[1]["param"]) == ("invalid_value", "n")
    assert lines[2]["code"] == "engine_died"


def test_one_connection_carries_many_requests(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True})
    for _ in range(3):
        connection.request("POST", "/v1/chat/completions", body)
        assert connection.getresponse().read().endswith(b"data: [DONE]\n\n")
        connection.request("POST", "/v1/chat/completions", "{")
        refused = connection.getresponse()
        assert (refused.status, refused.read()[:9]) == (400, b'{"error":')
    connection.close()


def test_metrics(server: Server) -> None:
    server.say("Hello", cached_tokens=16)
    server.chat(stream=True)
    server.chat(n=0)
    server.service.num_restarts = 2
    lines = server.send("/metrics").body.decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    endpoint = 'endpoint="/v1/chat/completions"'
    assert float(values[f'stoker_requests_total{{{endpoint},status="200"}}']) == 1
    assert float(values[f'stoker_requests_total{{{endpoint},status="400"}}']) == 1
    assert float(values["stoker_generated_tokens_total"]) == 6
    assert float(values["stoker_cached_tokens_total"]) == 16
    assert float(values["stoker_ttft_seconds_count"]) == 1
    assert float(values["stoker_itl_seconds_count"]) == 5
    assert float(values["stoker_engine_restarts_total"]) == 2
    assert float(values["stoker_preemptions_total"]) == 12
    assert float(values["stoker_kv_blocks_free"]) == 4
    assert float(values["stoker_running_sequences"]) == 3


def test_prompts_that_never_ran_do_not_count_as_cache_misses(server: Server) -> None:
    """While an engine restarts, refused requests are repeated."""
    server.say(overloaded=True)
    for fields in ({}, {"stream": True}, {"n": 2}):
        assert server.chat(**fields).status == 503
    metrics = server.send("/metrics").body.decode()
    assert "stoker_prompt_tokens_total 0.0" in metrics
    assert "stoker_e2e_seconds_count{" not in metrics


def test_a_prompt_of_the_old_tokenizer_does_not_reach_the_engine_of_another_model(
    start_server: Callable[..., Server],
) -> None:
    server = start_server(inline_chars=0, text_threads=1)
    go_on = threading.Event()
    busy = threading.Event()
    server.context.text_threads.submit(lambda: (busy.set(), go_on.wait(60)))
    assert busy.wait(60)
    waiting_texts = server.context.text_threads._work_queue
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(server.chat)
        wait_for(lambda: waiting_texts.qsize() == 1)  # the request now holds the old tokenizer
        server.context.text = replace(server.context.text)  # the drain has ended without this request
        go_on.set()
        refused = asked.result(60)
    assert (refused.status, refused.error["code"]) == (503, "model_switching")
    assert server.service.sent_chunks == 0

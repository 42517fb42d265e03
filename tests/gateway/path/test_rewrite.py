"""What is rewritten in a foreign worker's answer, and that nothing else changes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from mocks import DONE, chunk, event, usage, usage_chunk

from stoker.gateway.path.rewrite import (
    EventCutter,
    ForeignAnswer,
    UsageCounts,
    read_last_usage,
    read_usage,
    set_cached_tokens,
)


def pushed(answer: ForeignAnswer, stream: bytes, size: int) -> bytes:
    pieces = [answer.push(stream[start : start + size]) for start in range(0, len(stream), size)]
    return b"".join(pieces) + answer.finish()


STREAM = chunk("a") + chunk("b") + usage_chunk(10, 4, 2) + DONE


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_a_usage_chunk_requested_by_the_gateway_is_read_and_hidden(size: int) -> None:
    answer = ForeignAnswer(hide_usage=True)
    assert pushed(answer, STREAM, size) == chunk("a") + chunk("b") + DONE
    assert answer.usage == UsageCounts(10, 4, 2)
    assert answer.ended


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_a_client_that_asked_gets_every_byte(size: int) -> None:
    answer = ForeignAnswer()
    assert json_of(pushed(answer, STREAM, size)) == json_of(STREAM)
    assert answer.usage == UsageCounts(10, 4, 2)


def test_chunks_without_fields_to_rewrite_pass_as_the_same_object() -> None:
    data = chunk('say "usage": {}') + chunk("x", usage=None)
    assert ForeignAnswer().push(data) is data


def test_lines_may_end_in_crlf() -> None:
    stream = STREAM.replace(b"\n", b"\r\n")
    answer = ForeignAnswer(hide_usage=True)
    assert pushed(answer, stream, 5) == (chunk("a") + chunk("b") + DONE).replace(b"\n", b"\r\n")
    assert answer.usage == UsageCounts(10, 4, 2)


def test_usage_in_a_chunk_with_text_is_kept_even_if_the_client_did_not_request_it() -> None:
    last = chunk("b", usage=usage(10, 4, 2))
    assert json_of(ForeignAnswer(hide_usage=True).push(last)) == json_of(last)


@pytest.mark.parametrize("reported", [0, 9, 99, None])
@pytest.mark.parametrize("found", [0, 4, None])
def test_cached_tokens_of_a_pair_are_those_of_prefill(reported: int | None, found: int | None) -> None:
    """Decode counts received blocks as cached. Cached tokens that no worker reported are not passed on."""
    streamed, whole = ForeignAnswer(is_pair=True), ForeignAnswer(is_pair=True)
    streamed.prefill_cached_tokens = whole.prefill_cached_tokens = found
    [told] = json_of(streamed.push(usage_chunk(10, reported, 2)))
    answer = json.loads(whole.whole(json.dumps({"id": "c", "usage": usage(10, reported, 2)}).encode()))
    for got in (told, answer):
        assert got["usage"] == usage(10, found or 0, 2)
    assert streamed.usage == whole.usage == UsageCounts(10, found or 0, 2)


def test_cached_tokens_are_never_more_than_the_prompt() -> None:
    answer = ForeignAnswer()
    assert json.loads(answer.whole(json.dumps({"usage": usage(10, 12, 2)}).encode()))["usage"] == usage(10, 10, 2)
    [told] = json_of(ForeignAnswer().push(usage_chunk(10, 12, 2)))
    assert told["usage"] == usage(10, 10, 2)


def test_internal_fields_never_leave() -> None:
    secret = {"kv_transfer_params": {"remote_host": "10.0.0.7", "remote_port": 5}, "prompt_token_ids": [1, 2]}
    choice = {"index": 0, "delta": {"content": "x"}, "token_ids": [5]}
    shown = ForeignAnswer().push(event({"id": "c", "choices": [choice], **secret}))
    assert json_of(shown) == [{"id": "c", "choices": [{"index": 0, "delta": {"content": "x"}}]}]
    whole = ForeignAnswer().whole(json.dumps({"id": "c", "choices": [choice], **secret}).encode())
    assert json.loads(whole) == {"id": "c", "choices": [{"index": 0, "delta": {"content": "x"}}]}


def test_token_ids_requested_by_the_client_are_kept() -> None:
    data = event({"id": "c", "prompt_token_ids": [1], "choices": [{"index": 0, "token_ids": [5]}]})
    assert ForeignAnswer(keep_token_ids=True).push(data) is data


def test_a_whole_answer_with_nothing_to_change_is_the_same_object() -> None:
    data = json.dumps({"id": "c", "kind": "x", "usage": usage(10, 3, 2)}).encode()
    answer = ForeignAnswer()
    assert answer.whole(data) is data
    assert answer.usage == UsageCounts(10, 3, 2)


def test_the_responses_api_names_the_same_things_otherwise() -> None:
    told = {"input_tokens": 10, "input_tokens_details": {"cached_tokens": 9}, "output_tokens": 2, "total_tokens": 12}
    response = {"id": "r", "tools": [{"parameters": {"properties": {"usage": {"type": "string"}}}}], "usage": told}
    data = b"event: response.completed\n" + event({"type": "response.completed", "response": response})
    answer = ForeignAnswer(is_pair=True)
    answer.prefill_cached_tokens = 4
    shown = answer.push(data)
    assert shown.startswith(b"event: response.completed\ndata: {")
    [got] = json_of(shown.removeprefix(b"event: response.completed\n"))
    assert got["response"]["usage"]["input_tokens_details"] == {"cached_tokens": 4}
    assert {**got["response"], "usage": told} == response
    assert answer.usage == UsageCounts(10, 4, 2)
    assert answer.ended


def test_usage_is_found_wherever_it_is_and_nowhere_else() -> None:
    assert read_usage(b"not json") is None
    assert read_usage(b'{"usage":null}') is None
    assert read_last_usage(chunk("a") + usage_chunk(7, 1, 2) + DONE) == UsageCounts(7, 1, 2)
    assert read_last_usage(json.dumps({"usage": usage(7, None, 2)}).encode()) == UsageCounts(7, 0, 2)
    assert set_cached_tokens(b'{"x":1}', 5) == b'{"x":1}'


def test_a_torn_event_is_held_back() -> None:
    cutter = EventCutter()
    assert cutter.cut(b"data: 1\n\ndata: 2") == b"data: 1\n\n"
    assert cutter.cut(b"\n") == b""
    assert cutter.cut(b"\ndata: 3\r\n\r") == b"data: 2\n\n"
    assert cutter.cut(b"\n") == b"data: 3\r\n\r\n"
    assert cutter.rest == b""


def json_of(events: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in events.split(b"\n") if line.startswith(b"data: {")]

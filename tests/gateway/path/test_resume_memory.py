"""TokenMemory and StokerStream: what is forwarded, what is kept, and the resume field for another worker."""

from __future__ import annotations

import json

import pytest
from mocks import DONE, event

from stoker.gateway.path.resume import StokerStream, TokenMemory
from stoker.gateway.path.rewrite import UsageCounts

A, B, C = event({"t": "a"}), event({"t": "b"}), event({"t": "c"})
LINES = b":u 10 4 1700 42\n:t 0 5\n" + A + b":t 1 6 7\n" + B + b":t 0 8\n\n" + b":t 0 9\n:f 0\n" + C + b":e\n" + DONE


@pytest.mark.parametrize("size", [1, 2, 3, 11, 64, 10_000])
def test_lines_are_taken_out_wherever_the_bytes_are_cut(size: int) -> None:
    memory = TokenMemory()
    stream = StokerStream(memory)
    shown = b"".join(stream.push(LINES[start : start + size]) for start in range(0, len(LINES), size))
    assert shown == A + B + C + DONE
    assert stream.is_complete
    assert memory.num_tokens == 5
    assert memory.usage == UsageCounts(10, 4, 5)
    assert json.loads(memory.resume_field(3)) == {
        "created": 1700,
        "choices": [
            {"token_ids": [5, 8, 9], "finished": True},
            {"token_ids": [6, 7], "finished": False},
            {"token_ids": [], "finished": False},
        ],
    }


def test_an_incomplete_event_is_neither_forwarded_nor_kept() -> None:
    memory = TokenMemory()
    stream = StokerStream(memory)
    assert stream.push(b":u 10 4 1700 42\n:t 0 5\n" + A + b":t 0 6\ndata: {") == A
    assert memory.num_tokens == 1
    assert not stream.is_complete


def test_tokens_with_logprobs_are_handed_on_as_they_came() -> None:
    memory = TokenMemory()
    StokerStream(memory).push(b":u 10 4 1700 42\n:t 0 [5,-0.25,[5,6],[-0.25,-3.5]] [7,-1.0,[],[]]\n" + A)
    assert memory.num_tokens == 2
    assert json.loads(memory.resume_field(1))["choices"] == [
        {"token_ids": [[5, -0.25, [5, 6], [-0.25, -3.5]], [7, -1.0, [], []]], "finished": False}
    ]


def test_cached_tokens_are_those_of_the_first_worker() -> None:
    memory = TokenMemory()
    StokerStream(memory).push(b":u 10 4 1700 42\n:t 0 5\n" + A)
    second = StokerStream(memory)
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 9}}
    shown = second.push(b":u 10 9 1700 42\n:t 0 6\n" + event({"choices": [], "usage": usage}))
    assert json.loads(shown[6:])["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert memory.usage == UsageCounts(10, 4, 2)
    assert json.loads(memory.resume_field(1))["created"] == 1700


def test_a_first_worker_may_correct_itself() -> None:
    """The cached tokens of a request with several prompts become known one prompt after the other."""
    memory = TokenMemory()
    StokerStream(memory).push(b":u 20 4 1700 42\n:t 0 5\n" + A + b":u 20 12 1700 42\n:t 1 6\n" + B)
    assert memory.usage == UsageCounts(20, 12, 2)


def test_a_dead_engine_is_not_the_clients_business() -> None:
    memory = TokenMemory()
    stream = StokerStream(memory)
    error = b":x 503 engine_died\n" + event({"error": {"message": "dead", "code": "engine_died"}})
    assert stream.push(b":u 10 4 1700 42\n:t 0 5\n" + A + error) == A
    assert stream.failure == "engine_died"
    assert not stream.is_complete


def test_an_error_that_would_come_again_ends_the_stream() -> None:
    stream = StokerStream(TokenMemory())
    error = event({"error": {"message": "too late", "code": "deadline_exceeded"}})
    assert stream.push(b":x 504 deadline_exceeded\n" + error) == error
    assert stream.is_complete
    assert stream.failure is None


def test_text_that_looks_like_our_lines_is_text() -> None:
    memory = TokenMemory()
    text = event({"t": ":x 503 engine_died\n:t 0 5\n:k {}"})
    stream = StokerStream(memory)
    assert stream.push(b":u 10 4 1700 42\n:t 0 5\n" + text) == text
    assert (memory.num_tokens, memory.notes.ticket, stream.failure) == (1, None, None)


def test_a_ticket_ends_a_prefill_workers_part() -> None:
    memory = TokenMemory()
    stream = StokerStream(memory)
    assert stream.push(b":u 10 4 1700 42\n:t 0 5\n" + A + b':k {"host": "a b", "keys": [":t 0"]}\n\n') == A
    assert memory.notes.ticket == b'{"host": "a b", "keys": [":t 0"]}'
    assert memory.num_tokens == 1


def test_of_the_responses_api_events_are_counted() -> None:
    memory = TokenMemory()
    stream = StokerStream(memory, counts_events=True)
    stream.push(b":u 10 4 1700 42\n:t 0 5\n" + b"event: a\n" + A + b"event: b\n" + B + b"event: c\ndata: ")
    assert memory.num_events == 2
    assert json.loads(memory.resume_field(1))["events"] == 2
    stream.push(b"{}\n\n" + b"event: response.completed\n" + C)
    assert stream.is_complete


def test_a_stream_cut_after_its_usage_lacks_only_its_end() -> None:
    stream = StokerStream(TokenMemory())
    stream.push(b":e\n" + event({"choices": [], "usage": {"prompt_tokens": 1}}))
    assert stream.lacks_only_done
    assert not stream.is_complete

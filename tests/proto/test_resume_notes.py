"""Resume notes: what a worker writes is what the gateway reads, and becomes a valid `resume` field."""

from __future__ import annotations

import math

import msgspec

from stoker.proto.handoff import KvTransfer
from stoker.proto.resume_notes import (
    END_NOTE,
    ErrorNote,
    Resume,
    ResumeNotes,
    UsageNote,
    error_note,
    find_error,
    finish_note,
    handoff_note,
    logprobs_note,
    token_note,
    usage_note,
)
from stoker.proto.sse import DONE, encode_event
from stoker.sched.request import TokenLogprobs

EVENT = encode_event(b'{"a":1}')


def test_the_notes_have_these_bytes() -> None:
    """Workers and gateways of other versions write and read them."""
    assert usage_note(10, 4, 1700, 42) == b":u 10 4 1700 42\n"
    assert token_note(1, [5, 6]) == b":t 1 5 6\n"
    assert logprobs_note(0, [TokenLogprobs(5, -0.25, [5], [-0.25])]) == b":t 0 [5,-0.25,[5],[-0.25]]\n"
    assert finish_note(2) == b":f 2\n"
    assert END_NOTE == b":e\n"
    assert error_note(503, "engine_died") == b":x 503 engine_died\n"


def test_notes_are_taken_out_of_the_events_and_become_the_field() -> None:
    notes = ResumeNotes()
    assert not notes
    assert notes.take(usage_note(10, 4, 1700, 42) + token_note(0, [5, 6]) + EVENT) == EVENT
    assert notes.take(token_note(1, [7]) + EVENT + finish_note(0) + EVENT) == EVENT + EVENT
    assert notes.take(END_NOTE + DONE) == DONE
    assert notes.take(EVENT) == EVENT
    assert notes
    assert notes.num_tokens == 3
    assert notes.last_usage == UsageNote(10, 4, 1700)
    resume = msgspec.json.decode(notes.resume_field(2, num_events=9), type=Resume)
    assert (resume.created, resume.events) == (1700, 9)
    assert [(choice.token_ids, choice.finished) for choice in resume.choices] == [([5, 6], True), ([7], False)]


def test_tokens_with_logprobs_are_valid_items_of_the_field() -> None:
    notes = ResumeNotes()
    tokens = [TokenLogprobs(5, -0.25, [5, 6], [-0.25, -math.inf]), TokenLogprobs(7, -1.0, [], [])]
    notes.take(usage_note(1, 0, 1, 1) + logprobs_note(0, tokens) + EVENT)
    assert notes.num_tokens == 2
    (choice,) = msgspec.json.decode(notes.resume_field(1), type=Resume).choices
    assert [token.token_id for token in choice.token_ids if not isinstance(token, int)] == [5, 7]


def test_a_handoff_note_becomes_the_ticket_and_not_a_token() -> None:
    notes = ResumeNotes()
    transfer = KvTransfer.announced("e-1", "127.0.0.1:7000", "x.1-0")
    assert notes.take(token_note(0, [5]) + EVENT + handoff_note(transfer) + b"\n") == EVENT
    assert notes.ticket == msgspec.json.encode(transfer)
    assert notes.num_tokens == 1


def test_errors_are_found_where_they_stand() -> None:
    assert find_error(EVENT + error_note(503, "engine_died") + EVENT) == ErrorNote(len(EVENT), 503, "engine_died")
    assert find_error(encode_event(b'{"text":":x 503 y"}')) is None

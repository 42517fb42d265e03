from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sse_reader import SseEvent, SseReader

from stoker.proto.sse import DONE, encode_event

WIRE = b": a comment\r\nevent: one\r\ndata: {}\r\n\r\ndata: a\rdata:b\r\rdata: \xc3\xa9\nid: 7\n\n" + DONE
EVENTS = [SseEvent(b"{}", "one"), SseEvent(b"a\nb"), SseEvent("é".encode()), SseEvent(b"[DONE]")]


def test_encoded_events_are_read_back() -> None:
    wire = encode_event(b'{"a":1}') + encode_event(b"{}", "named") + DONE
    assert SseReader().push(wire) == [SseEvent(b'{"a":1}'), SseEvent(b"{}", "named"), SseEvent(b"[DONE]")]
    assert SseReader().push(DONE)[0].is_done


@given(st.lists(st.integers(0, len(WIRE))), st.booleans())
def test_events_may_be_split_anywhere(borders: list[int], marked: bool) -> None:
    wire = b"\xef\xbb\xbf" * marked + WIRE
    cuts = [0, *sorted(borders), len(wire)]
    reader = SseReader()
    events = [event for a, b in itertools.pairwise(cuts) for event in reader.push(wire[a:b])]
    assert events == EVENTS


def test_an_incomplete_event_is_not_returned() -> None:
    reader = SseReader()
    assert reader.push(b"data: x\n") == []
    assert reader.push(b"\n") == [SseEvent(b"x")]


def test_an_event_over_the_size_limit_is_refused() -> None:
    reader = SseReader(max_event_bytes=100)
    reader.push(b"data: 0123456789\n")
    with pytest.raises(ValueError, match="100 bytes"):
        reader.push(b"data: 0123456789\n" * 10)

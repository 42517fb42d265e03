"""A stop string ends the text at the same place for all chunk borders."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.base.errors import InvalidRequest
from stoker.text.stops import StopStrings

letters = st.text(alphabet="aab\n", max_size=40)
stop_lists = st.lists(st.text(alphabet="aab\n", min_size=1, max_size=5), max_size=4)


def _naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None, print_blob=True)
@given(text=letters, stops=stop_lists, sizes=st.lists(st.integers(0, 5), max_size=20), include=st.booleans())
def test_chunk_borders_do_not_change_the_result(text: str, stops: list[str], sizes: list[int], include: bool) -> None:
    found = StopStrings(stops, include_stop=include)
    out, at = "", 0
    for size in [*sizes, len(text)]:
        out += found.push(text[at : at + size])
        at += size
        assert found.stopped is not None or len(found._held) < max(map(len, stops), default=1)
    out += found.flush()
    assert (out, found.stopped) == _naive(text, stops, include)


def test_only_the_possible_start_of_a_stop_string_is_held_back() -> None:
    stops = StopStrings(["\n\nUser:"])
    assert stops.push("Hello\n") == "Hello"
    assert stops.push("world") == "\nworld"
    assert stops.push("\n\nUse") == ""
    assert stops.flush() == "\n\nUse"


def test_nothing_is_sent_after_a_stop_string() -> None:
    stops = StopStrings(["END"])
    assert stops.push("a END b") == "a "
    assert (stops.push("more"), stops.flush(), stops.stopped) == ("", "", "END")


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        StopStrings(["x", ""])
    assert refused.value.param == "stop"

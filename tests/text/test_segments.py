"""Splitting a text at added tokens gives the same segments in windows as in one search."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.text import segments
from stoker.text.segments import AddedToken, Splitter

MARKS = ["<a>", "<a><b>", "<b>", "b><a"]
ADDED = [AddedToken(mark, normalized=False, lstrip=False, rstrip=False, single_word=False) for mark in MARKS]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*MARKS, "<", "a", ">", "x", "\n"]), max_size=60).map("".join), st.integers(1, 12))
def test_windows_do_not_change_the_segments(text: str, window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "_WINDOW_CHARS", window)
        pieces = Splitter(ADDED, newline_settles=False).split(text)
    whole = re.compile("|".join(map(re.escape, sorted(MARKS, key=len, reverse=True))))
    borders = [0, *(match.start() for match in whole.finditer(text) if match.start()), len(text)]
    expected = [text[start:end] for start, end in itertools.pairwise(borders) if end > start]
    assert pieces == expected

"""Reasoning is split off at the same place for all chunk borders."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.text.parsers.contract import REASONING_PARSERS, ReasoningDelta


def _parse(chunks: list[str], starts_inside: bool) -> tuple[str, str]:
    parser = REASONING_PARSERS.get("think")(starts_inside)
    deltas = [delta for chunk in chunks for delta in parser.push(chunk)] + parser.flush()
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    return reasoning, "".join(delta.text for delta in deltas if not isinstance(delta, ReasoningDelta))


@pytest.mark.parametrize(
    ("text", "starts_inside", "expected"),
    [
        ("<think>\nHm, \n2.\n</think>\n\nTwo.\n", False, ("Hm, \n2.", "Two.\n")),
        ("Hm.\n</think>\n\nTwo.", True, ("Hm.", "Two.")),
        ("<think>\nHm.</think>Two.", True, ("Hm.", "Two.")),
        ("Two. <think> is a tag", False, ("", "Two. <think> is a tag")),
        ("<think>\n\n</think>\n\nTwo.", False, ("", "Two.")),
        ("<think>cut of", False, ("cut of", "")),
        ("still </thin", True, ("still </thin", "")),
        ("a </think> b </think> c", True, ("a", "b </think> c")),
        (" <thin", False, ("", " <thin")),
        ("", True, ("", "")),
    ],
)
def test_reasoning_and_text(text: str, starts_inside: bool, expected: tuple[str, str]) -> None:
    assert _parse([text], starts_inside) == expected
    assert _parse(list(text), starts_inside) == expected


@settings(max_examples=300, deadline=None, print_blob=True)
@given(
    parts=st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think", ">", " ", "\n", "a", "é"]), max_size=14),
    sizes=st.lists(st.integers(0, 9), max_size=20),
    starts_inside=st.booleans(),
)
def test_chunk_borders_do_not_change_the_result(parts: list[str], sizes: list[int], starts_inside: bool) -> None:
    text = "".join(parts)
    chunks, at = [], 0
    for size in [*sizes, len(text)]:
        chunks.append(text[at : at + size])
        at += size
    assert _parse(chunks, starts_inside) == _parse([text], starts_inside)


def test_the_prompt_shows_whether_the_block_is_open() -> None:
    opened_by = REASONING_PARSERS.get("think").opened_by
    assert opened_by("<|im_start|>assistant\n<think>\n")
    assert not opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opened_by("<|im_start|>assistant\n")

"""How `<think>` blocks are read. tests/conformance/test_parsers.py tests what holds for every reasoning parser."""

from __future__ import annotations

import pytest
from parsing import parse_reasoning

from stoker.text.parsers.contract import REASONING_PARSERS


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
    assert parse_reasoning("think", [text], starts_inside) == expected
    assert parse_reasoning("think", list(text), starts_inside) == expected


def test_the_prompt_shows_whether_the_block_is_open() -> None:
    opened_by = REASONING_PARSERS.get("think").opened_by
    assert opened_by("<|im_start|>assistant\n<think>\n")
    assert not opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opened_by("<|im_start|>assistant\n")

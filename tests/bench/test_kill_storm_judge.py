"""The judge of the kill_storm benchmark finds every kind of damage. The storm itself is a slow test of the harness."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from bench.faults.kill_storm import StormRequest, StormTally, is_beginning, judge
from bench.faults.soak import SoakAnswer

ARGS = argparse.Namespace(seed=1, bound_s=60.0, ready_s=60.0)


def answer(text: str, prompt: int = 7, completion: int = 3) -> SoakAnswer:
    made = SoakAnswer(usage={"prompt_tokens": prompt, "completion_tokens": completion})
    made.choice(0)["content"] = text
    return made


def problems(rows: dict[str, Any], **changed: Any) -> list[str]:
    tally = StormTally()
    tally.requests["a"] = StormRequest(0, "complete", answer("yes"), True)
    tally.requests["b"] = StormRequest(0, "cut", answer("ye"), True)
    event = {"victim": "gateway", "signal": "SIGKILL", "ready_after_s": 1.0}
    seen = {"events": [event], "growth_mib": {"gateway": 1.0}, "exit_code": 0, "left": {"processes": []}} | changed
    return judge(ARGS, tally, rows, seen).problems


def test_a_row_per_complete_answer_and_at_most_one_per_cut_answer_is_right() -> None:
    assert problems({"a": [(200, 7, 3)]}) == []
    assert problems({"a": [(200, 7, 3)], "b": [(499, 7, 2)]}) == []


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({}, "1 answered requests have no row"),
        ({"a": [(200, 7, 3), (200, 7, 3)]}, "1 requests have two rows"),
        ({"a": [(200, 7, 3)], "b": [(499, 0, 0), (499, 0, 0)]}, "1 requests have two rows"),
        ({"a": [(200, 7, 2)]}, "1 rows have other token counts"),
    ],
)
def test_damage_in_the_ledger_is_found(rows: dict[str, Any], said: str) -> None:
    [problem] = problems(rows)
    assert said in problem


@pytest.mark.parametrize(
    "changed",
    [
        {"exit_code": 1},
        {"left": {"processes": ["7 engine"]}},
        {"growth_mib": {"gateway": 500.0}},
        {"events": [{"victim": "gateway", "signal": "SIGKILL", "ready_after_s": 61.0}]},
    ],
)
def test_what_is_left_behind_is_found(changed: dict[str, Any]) -> None:
    assert len(problems({"a": [(200, 7, 3)]}, **changed)) == 1


def test_a_cut_answer_must_begin_like_the_right_one() -> None:
    assert is_beginning(SoakAnswer(), answer("right"))
    assert is_beginning(answer("rig"), answer("right"))
    assert not is_beginning(answer("wrong"), answer("right"))
    assert not is_beginning(answer("right and more"), answer("right"))

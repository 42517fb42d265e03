from __future__ import annotations

import io

import pytest
from rich.console import Console

from stoker.base.clock import VirtualClock
from stoker.loadgen.load import LoadPlan
from stoker.loadgen.progress import RunEstimate, describe_duration, progress_bar
from stoker.loadgen.session import FollowUp, LoadSession, Turn
from stoker.loadgen.stream import Delta, Record

TURN = Turn(FollowUp(["hi"]), session="s", max_tokens=10)


def sessions(count: int, **fields: float) -> list[LoadSession]:
    return [LoadSession([TURN], **fields) for _ in range(count)]


def test_tokens_give_an_estimate_before_the_first_request_has_ended():
    estimate = RunEstimate(sessions(4), LoadPlan(slots=2), 10)
    assert estimate.remaining_s(1.0) is None
    for _ in range(8):
        estimate.received(Delta(content="a"))
    assert estimate.remaining_s(2.0) == pytest.approx(8.0)


def test_a_request_that_stops_early_counts_as_done():
    estimate = RunEstimate(sessions(4), LoadPlan(slots=2), 10)
    for _ in range(3):
        estimate.received(Delta(content="a"))
    estimate.ended(TURN, Record(started_s=0.0, num_chunks=3))
    assert estimate.remaining_s(2.0) == pytest.approx(6.0)


def test_an_open_loop_run_has_an_estimate_from_the_start():
    estimate = RunEstimate(sessions(11), LoadPlan(rate=2.0, arrival="constant"), 10)
    assert estimate.remaining_s(0.0) == pytest.approx(5.0)
    assert estimate.remaining_s(4.0) == pytest.approx(1.0)


def test_the_pauses_of_a_trace_bound_the_estimate():
    paused = LoadSession([Turn(FollowUp(["hi"]), session="s", pause_s=30.0)] * 2, start_s=5.0)
    assert RunEstimate([paused], LoadPlan(), 10).remaining_s(0.0) == pytest.approx(65.0)


@pytest.mark.parametrize(("seconds", "text"), [(4.4, "4 s"), (65.0, "1 min 05 s"), (3720.0, "1 h 02 min")])
def test_durations_are_written_in_words(seconds: float, text: str):
    assert describe_duration(seconds) == text


def test_the_bar_shows_the_estimate():
    shown = Console(file=io.StringIO(), force_terminal=True, width=120)
    estimate = RunEstimate(sessions(11), LoadPlan(rate=2.0, arrival="constant"), 10)
    with progress_bar(shown, estimate, VirtualClock()) as bar:
        bar.add_task("requests", total=11)
        bar.refresh()
        assert "about 5 s left" in shown.file.getvalue()

"""The text of `stoker top`: it fits the terminal, names what matters, and passes no control characters on."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.proto.admin_api import (
    GatewayStatus,
    NowAnswer,
    ReportedLoad,
    ReservedLoad,
    SeriesAnswer,
    WorkerStatus,
)
from stoker.up.top_view import TopLook, TopState, top_lines

VALUES = {
    "ttft_p50_ms": 120.0,
    "ttft_p95_ms": 2400.0,
    "itl_p50_ms": 8.0,
    "itl_p95_ms": 20.0,
    "requests_per_s": 10.0,
    "goodput_per_s": 9.0,
    "hit_ratio": 0.83,
    "saved": 0.5,
    "prompt_tokens_per_s": 120_000.0,
    "completion_tokens_per_s": None,
}


def worker(name: str, **more: Any) -> WorkerStatus:
    return WorkerStatus(worker=name, url=f"http://{name}", role="unified", usable=True, **more)


def state(*workers: WorkerStatus, bottleneck: str = "Prefill: 40k prompt tokens wait.") -> TopState:
    now = NowAnswer(
        time_s=1000.0,
        bottleneck=bottleneck,
        values=VALUES,
        point={"running_requests": 7.0, "waiting_requests": 2.0},
        has_prices=True,
        ttft_goal_ms=2000.0,
        itl_goal_ms=100.0,
    )
    series = SeriesAnswer(step_s=1, times_s=[1.0, 2.0, 3.0], columns={"ttft_p95_ms": [None, 100.0, 2400.0]})
    return TopState("http://gateway:8000", GatewayStatus(version="1.2", uptime_s=7300.0), now, series, workers)


def test_a_frame_has_the_numbers_and_the_workers() -> None:
    report = ReportedLoad(kv_used=0.97, running_sequences=12, waiting_sequences=3)
    busy = worker(
        "w:2", report=report, reserved=ReservedLoad(requests=15, prefill_tokens=40_000, context_tokens=90_000)
    )
    text = "\n".join(top_lines(state(worker("w:1", draining=True), busy), TopLook(120)))
    for part in (
        "up 2 h 1 min",
        "Prefill: 40k prompt tokens wait.",
        "120 ms, p95 2.40 s",
        "9/s, 90%",
        "83%",
        "30.00 USD/h",
        "7 running, 2 waiting",
        "draining",
        "97%!",
        "40k",
    ):
        assert part in text, part
    assert "\033" not in text


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("count", [0, 1, 64])
def test_no_line_is_wider_than_the_terminal(width: int, count: int) -> None:
    workers = [worker(f"a-long-name-of-a-machine-{number}.example:8000") for number in range(count)]
    lines = top_lines(state(*workers, bottleneck="word " * 60), TopLook(width))
    assert max(map(len, lines)) <= width
    assert all(any(f"-{number}.example:8000" in line for line in lines) for number in range(count))
    assert len(lines) >= count


def test_a_frame_is_cut_to_the_height_of_the_terminal() -> None:
    lines = top_lines(state(*(worker(f"w:{number}") for number in range(64))), TopLook(80, height=24))
    assert len(lines) == 24
    assert "more lines" in lines[-1]


def test_names_cannot_control_the_terminal() -> None:
    hostile = worker("w\033[2J\r\n\x9b31m:1")
    lines = top_lines(state(hostile, bottleneck="a\033]0;title\007b"), TopLook(100, has_color=True))
    text = "\n".join(lines)
    assert "\033[2J" not in text
    assert "\033]" not in text
    assert "\x9b" not in text
    assert "\r" not in text
    assert "w?[2J???31m:1" in text


def test_a_gateway_without_workers_and_without_requests() -> None:
    empty = NowAnswer(time_s=0.0, bottleneck="No worker is connected.", values={}, point={})
    series = SeriesAnswer(step_s=1, times_s=[], columns={})
    lines = top_lines(TopState("u", GatewayStatus(version="1"), empty, series, ()), TopLook(80))
    assert any("no prices" in line for line in lines)
    assert lines[-1] == "No worker is connected."

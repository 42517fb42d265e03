"""`stoker sim`: the same bytes for the same input, errors that name the option, and calibrations that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from sim_world import calibration

from stoker.cli.main import main
from stoker.sim.calibration import CalibrationError, read_calibration, write_calibration
from stoker.sim.report import svg_plot

LOAD = ["--num-requests", "60", "--rate", "5", "--turns", "3", "--input-tokens", "100", "--output-tokens", "20"]
LOAD += ["--system-tokens", "100", "--think-s", "1"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "worker.json"
    write_calibration(calibration(), path)
    return path


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["sim", *argv]) == 0
    return capsys.readouterr().out


def error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["sim", *argv]) == 2
    return capsys.readouterr().err


def test_the_same_seed_gives_the_same_bytes(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pages, texts = [], []
    for number in range(2):
        page = tmp_path / f"{number}.html"
        fleet = ["--prefill", "1", "--decode", "1", "--html", str(page)]
        texts.append(output(capsys, "--calibration", str(file), *fleet, *LOAD, "--json"))
        pages.append(page.read_bytes())
    assert texts[0] == texts[1]
    assert pages[0] == pages[1]
    other = output(
        capsys, "--calibration", str(file), "--prefill", "1", "--decode", "1", *LOAD, "--json", "--seed", "1"
    )
    assert other != texts[0]


def test_the_report_has_every_result(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "sim.html"
    argv = [
        "--calibration",
        str(file),
        "--unified",
        "2",
        "--host-gib",
        "1",
        "--gpu-hour-price",
        "2",
        "--html",
        str(page),
    ]
    found = json.loads(output(capsys, *argv, *LOAD, "--json"))
    summary = found["summary"]
    assert summary["outcomes"] == {"ok": 60}
    assert set(summary["hits_by_tier"]) == {"device", "host"}
    assert summary["cost_per_million_tokens"] > 0
    assert found["fast"]["ttft_ms"]["p50"] < summary["ttft_ms"]["p50"] < found["slow"]["ttft_ms"]["p50"]
    text = output(capsys, *argv, *LOAD)
    for word in ("TTFT", "between tokens", "end to end", "goodput", "utilisation", "GPU-hours", "cost"):
        assert word in text
    assert page.read_text().count("<svg") == 3


def test_a_goal_counts_only_the_requests_that_keep_it(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--calibration", str(file), *LOAD, "--no-range", "--json"]
    rates = [
        json.loads(output(capsys, *argv, "--goal-ttft-ms", goal))["summary"]["goodput_per_s"]
        for goal in ("1", "30", "9e9")
    ]
    assert rates[0] == 0 < rates[1] < rates[2]


def test_steps_beyond_the_calibrated_bounds_are_reported(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "--calibration", str(file), *LOAD, "--no-range")
    assert "beyond the calibrated bounds" not in text
    found = calibration()
    write_calibration(msgspec.structs.replace(found, bounds=msgspec.structs.replace(found.bounds, rows=1)), file)
    text = output(capsys, "--calibration", str(file), *LOAD, "--no-range")
    assert "beyond the calibrated bounds (1 rows" in text


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ((), "--calibration FILE"),
        (("--calibration", "absent.json"), "no such file"),
        (("--unified", "0"), "0 workers"),
        (("--unified", "-1"), "--unified -1"),
        (("--prefill", "1"), "--prefill 1"),
        (("--kv-blocks", "0"), "--kv-blocks 0"),
        (("--kv-blocks", "100000000"), "can be simulated"),
        (("--rate", "0"), "--rate 0"),
        (("--spread", "2"), "--spread 2"),
        (("--concurrency", "0"), "--concurrency 0"),
        (("--goal-ttft-ms", "0"), "--goal-ttft-ms 0"),
        (("--policy", "best"), "unknown routing policy 'best'"),
        (("--fault", "loss:unified-0"), "--fault 'loss:unified-0': expected KIND:WORKER"),
        (("--fault", "fire:unified-0@1+1"), "'fire' is not a kind of fault"),
        (("--fault", "loss:unified-9@1+1"), "no worker 'unified-9'"),
        (("--fault", "slow:unified-0@1+1"), "needs a factor"),
        (("--fault", "loss:unified-0@1+0"), "must be above 0"),
        (("--trace", "absent.jsonl"), "no file absent.jsonl"),
        (("--model", "other"), "is for the model tiny (abc), not for other"),
        (("--html", "/absent/sim.html"), "there is no folder /absent"),
    ],
)
def test_wrong_options_are_named(
    file: Path, argv: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = () if not argv or "--calibration" in argv else ("--calibration", str(file))
    message = error(capsys, *given, *argv)
    assert problem in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"stoker": "0.0.1"}, "written by Stoker 0.0.1"),
        ({"format": 99}, "format 99"),
        ({"step": {"knots": [1, 2], "knot_s": [0.1]}}, "step.knots"),
        ({"step": {"knots": [1], "knot_s": [0.0]}}, "step.knot_s[0]=0.0"),
        ({"step": {"knots": [1], "knot_s": [0.1], "row_s": -1}}, "step.row_s=-1"),
        ({"residuals": {"median": 0, "p90": 0, "range_share": 1.5}}, "residuals.range_share=1.5"),
        ({"surprise": 1}, "surprise"),
        ({"bounds": {"rows": 1}}, "step_tokens"),
        ({"shape": {"block_tokens": "x"}}, "$.shape.block_tokens"),
    ],
)
def test_a_calibration_that_cannot_be_used_is_refused(file: Path, change: dict[str, Any], problem: str) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(CalibrationError) as wrong:
        read_calibration(file, calibration().stoker)
    assert problem in wrong.value.message


def test_a_cut_off_calibration_is_refused(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(CalibrationError, match="not a calibration file"):
        read_calibration(file, calibration().stoker)


def test_plots_are_valid_and_escape_names() -> None:
    plot = svg_plot("<a & b>", "s", "ms", {"<x>": [(0.0, 1.0), (2.0, 3.0)], "y": []})
    texts = [one.text for one in ElementTree.fromstring(plot).iter() if one.text]
    assert "<a & b>" in texts
    assert "<x>" in texts

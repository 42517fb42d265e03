from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from sim_world import calibration

import stoker
from stoker.base.errors import ConfigError
from stoker.cli.main import main
from stoker.sim.calibration import write_calibration
from stoker.sim.fleet_search import FleetOption, FleetSearch, SearchedFleet, SearchGoal
from stoker.sim.summary import LatencyGoal
from stoker.sim.workloads.synthetic import Synthetic

GOAL = SearchGoal(LatencyGoal(0.5, 0.05), 0.9)


def nothing(one: SearchedFleet) -> None:
    """Ignore progress."""


def load(rate: float, input_tokens: int, output_tokens: int, requests: int = 30) -> Synthetic:
    return Synthetic(
        requests=requests,
        rate=rate,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        spread=0.3,
        turns=1,
        system_tokens=0,
        systems=1,
        think_s=0.0,
        fixed=False,
        seed=3,
    )


def search(workload: Synthetic, goal: SearchGoal = GOAL, max_gpus: int = 6, **options: Any) -> FleetSearch:
    return FleetSearch(workload, goal, max_gpus, nothing, **options)


def test_the_picked_fleet_keeps_the_goal_and_one_worker_less_does_not() -> None:
    found = search(load(10.0, 1000, 20)).run([FleetOption(calibration())])
    assert found.picked is not None
    assert found.picked.good_share >= GOAL.share
    assert found.picked.fleet.num_workers > 1
    smaller = [one for one in found.tried if one.fleet.num_workers == found.picked.fleet.num_workers - 1]
    assert smaller
    assert all(one.good_share < GOAL.share for one in smaller)
    assert "The constraint: " in found.binding


@pytest.mark.parametrize(("input_tokens", "output_tokens"), [(1500, 10), (200, 60)])
def test_the_choice_costs_at_most_a_tenth_more_than_that_of_an_exhaustive_search(
    input_tokens: int, output_tokens: int
) -> None:
    workload = load(8.0, input_tokens, output_tokens, 24)
    fast = search(workload).run([FleetOption(calibration())])
    full = search(workload, exhaustive=True).run([FleetOption(calibration())])
    assert fast.picked is not None
    assert full.picked is not None
    assert fast.picked.price_per_hour <= 1.1 * full.picked.price_per_hour
    assert len(fast.tried) <= len(full.tried)


def test_the_cheaper_layout_is_picked() -> None:
    two_gpus = calibration(gpus=2)
    options = [FleetOption(two_gpus), FleetOption(calibration()), FleetOption(calibration(), gpu_hour_price=9.0)]
    found = search(load(5.0, 400, 20)).run(options)
    assert found.picked is not None
    assert found.picked.option is options[1]


def test_a_goal_that_cannot_be_met_names_the_constraint() -> None:
    found = search(load(20.0, 1500, 10), SearchGoal(LatencyGoal(0.001, None)), max_gpus=2).run(
        [FleetOption(calibration())]
    )
    assert found.picked is None
    assert "the first token is too late" in found.binding
    assert "prefill" in found.binding or "unified" in found.binding


def test_requests_that_no_worker_can_take_are_named_as_the_constraint() -> None:
    found = search(load(1.0, 1000, 10), max_gpus=2).run([FleetOption(calibration(max_model_tokens=900))])
    assert found.picked is None
    assert "are longer than the 900 tokens that a worker takes" in found.binding
    assert "queue" not in found.binding


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        ((None, None, 0.9), "give a latency goal"),
        ((1.0, None, 0.0), "--goal-share 0"),
        ((1.0, None, 1.5), "--goal-share 1.5"),
    ],
)
def test_impossible_goals_are_refused(goal: tuple[float | None, float | None, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SearchGoal(LatencyGoal(*goal[:2]), goal[2])


@pytest.fixture
def files(tmp_path: Path) -> Path:
    import msgspec

    write_calibration(msgspec.structs.replace(calibration(), stoker=stoker.__version__), tmp_path / "worker.json")
    rng = random.Random(1)
    rows = []
    for number in range(20):
        length = rng.randrange(300, 1500)
        ids = [number * 100 + i for i in range(-(-length // 512))]
        rows.append({"timestamp": number * 150, "input_length": length, "output_length": 10, "hash_ids": ids})
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def plan(files: Path, *more: str) -> int:
    given = ["--trace", str(files / "trace.jsonl"), "--calibration", str(files / "worker.json"), "--goal-share", "0.9"]
    return main(["plan", *given, *more])


def test_the_command_writes_a_fleet_that_its_check_accepts(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet, plot = files / "fleet.toml", files / "plot.svg"
    goals = ("--goal-ttft-ms", "600", "--goal-itl-ms", "60")
    assert plan(files, *goals, "--fleet-file", str(fleet), "--svg", str(plot)) == 0
    assert "Picked: " in capsys.readouterr().out
    assert plot.read_text().startswith("<svg")
    assert plan(files, *goals, "--check", str(fleet)) == 0
    assert "keep the goal for" in capsys.readouterr().out
    assert plan(files, "--goal-ttft-ms", "1", "--check", str(fleet)) == 1
    assert "too late" in capsys.readouterr().out
    assert plan(files, *goals, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["picked"]["good_share"] >= 0.9
    assert found["frontier"][-1]["price_per_hour"] >= found["picked"]["price_per_hour"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "give a latency goal"),
        (("--goal-ttft-ms", "500", "--max-gpus", "0"), "--max-gpus 0"),
        (("--goal-ttft-ms", "500", "--gpu-hour-price", "1", "--gpu-hour-price", "2"), "give one for each"),
        (("--goal-ttft-ms", "500", "--kv-ram-gib", "-1"), "--kv-ram-gib"),
        (("--goal-ttft-ms", "500", "--check", "/nonexistent.toml"), "No such file"),
        (("--goal-ttft-ms", "500", "--num-requests", "0"), "--num-requests 0"),
    ],
)
def test_wrong_arguments_are_named(
    files: Path, more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(files, *more) == 2
    assert message in capsys.readouterr().err


def test_a_model_or_a_trace_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpus", "8xH100"]) == 2
    assert "give a MODEL" in capsys.readouterr().err

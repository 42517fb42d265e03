"""The simulator's prediction beside real runs of the same load: SmolLM2 on a CPU, two workers and a gateway.

Each layout is started, calibrated over HTTP, and then loaded --repeats times with new prompts in each case. `stoker sim` gets
the same load. The cases are agents in a closed loop, a saturated load, prompts longer than any calibrated one, and a KV pool
of 0.35 times the working set, for which the workers are started again.

The result of a median is its error beside what is allowed: 8%, or the spread of the real runs if that is larger. The spread is
the largest minus the smallest value, relative to the median. For a p90, 15% are allowed, and for the hit ratio one point. The
machine must be otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from bench.contract import Needs, Report, Result
from bench.support.cpu_fleet import (
    BLOCK,
    AgentLoad,
    FleetShape,
    calibrate,
    play_load,
    predict_load,
    real_gateway,
    real_workers,
    write_trace,
)

NAME = "sim_accuracy"
HELP = "predictions of stoker sim beside real runs on a CPU: TTFT, time between tokens, hit ratio"
NEEDS = Needs(packages=("torch", "aiohttp", "msgspec"))
LAYOUTS = {"2 unified": ("unified", "unified"), "1 prefill, 1 decode": ("prefill", "decode")}
POOL_SHARE = 0.35
MOST_ROWS = 16  # all sessions of the saturated load on one decode worker
# What is allowed: percent for times, points for the hit ratio, and whether the spread of the real runs is allowed, too.
ALLOWED = {
    "ttft_p50_ms": (8.0, True),
    "itl_p50_ms": (8.0, True),
    "e2e_p50_ms": (8.0, True),
    "ttft_p90_ms": (15.0, False),
    "itl_p90_ms": (15.0, False),
    "hit_ratio": (1.0, False),
}
MEDIANS = ("error of ttft_p50_ms", "error of itl_p50_ms")
_LEAST_ERROR = 0.01  # a smaller error counts as this one: the ratio to what is allowed must exist

AGENTS = AgentLoad("agents", sessions=8, turns=3, system=192, step=96, out=24, think_s=0.5, concurrency=4)
SATURATED = AgentLoad("saturated", sessions=16, turns=1, system=96, step=128, out=24, think_s=0.0, concurrency=16)
LONG = AgentLoad(
    "long prompts, not calibrated", sessions=6, turns=1, system=0, step=1100, out=16, think_s=0.0, concurrency=2
)
SMALL_POOL = AgentLoad("pool of 0.35x", sessions=14, turns=3, system=192, step=128, out=24, think_s=0.2, concurrency=4)
CASES = (AGENTS, SATURATED, LONG, SMALL_POOL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    titles = [case.title for case in CASES]
    parser.add_argument("--repeats", type=int, default=3, help="real runs of each case (default: %(default)s)")
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS), help="default: all")
    parser.add_argument("--cases", nargs="+", choices=titles, default=titles, help="default: all")


def run(args: argparse.Namespace) -> Report:
    report = Report(details=[])
    cases = [case for case in CASES if case.title in args.cases]
    with tempfile.TemporaryDirectory() as scratch:
        for layout in args.layouts:
            found = Report(details=report.details)
            _run_layout(layout, cases, args.repeats, Path(scratch), found)
            report.results += [*found.results, _median(f"{layout}: {len(cases)} cases", found.results)]
    if len(args.layouts) > 1:
        report.results.append(_median(f"{len(args.layouts)} layouts, {len(cases)} cases", report.results))
    return report


def _run_layout(layout: str, cases: list[AgentLoad], repeats: int, scratch: Path, report: Report) -> None:
    from stoker import __version__
    from stoker.sim.calibration import read_calibration

    shape = FleetShape(LAYOUTS[layout])
    with real_workers(shape, scratch) as workers:
        with real_gateway(shape, workers, scratch) as fleet:
            calibration = read_calibration(calibrate(fleet, shape, scratch, MOST_ROWS), __version__)
        for case in cases:
            if case is not SMALL_POOL:
                real = _real_runs(layout, case, shape, workers, repeats, 0.0, scratch)
                _compare(
                    layout, case, real, predict_load(case, shape, calibration, _traces(case, repeats, scratch)), report
                )
    if SMALL_POOL not in cases:
        return
    blocks = int(POOL_SHARE * SMALL_POOL.working_set_tokens / len(shape.roles) / BLOCK)
    small = replace(shape, kv_blocks=blocks)
    with real_workers(small, scratch) as workers:
        real = _real_runs(layout, SMALL_POOL, small, workers, repeats, _settle_s(), scratch)
    predicted = predict_load(SMALL_POOL, small, calibration, _traces(SMALL_POOL, repeats, scratch))
    _compare(layout, SMALL_POOL, real, predicted, report)


def _settle_s() -> float:
    """Return the time after which blocks that were reused in a run have no advantage over those of the next one."""
    from stoker.kv.blocks.free_blocks import MATCHED_BONUS_S

    return MATCHED_BONUS_S


def _traces(case: AgentLoad, repeats: int, scratch: Path) -> list[Path]:
    return [write_trace(case, number, scratch) for number in range(repeats)]


def _real_runs(
    layout: str, case: AgentLoad, shape: FleetShape, workers: list[str], repeats: int, pause_s: float, scratch: Path
) -> list[dict[str, float]]:
    real = []
    for number, trace in enumerate(_traces(case, repeats, scratch)):
        time.sleep(pause_s if number else 0.0)
        before = os.getloadavg()[0]
        with real_gateway(shape, workers, scratch) as fleet:
            real.append({**play_load(case, trace, fleet), "load_average": before})
        print(layout, case.title, number, json.dumps(real[-1]), flush=True)
    return real


def _compare(
    layout: str, case: AgentLoad, real: list[dict[str, float]], predicted: dict[str, float], report: Report
) -> None:
    print(layout, case.title, "predicted", json.dumps(predicted), flush=True)
    report.details.append({"layout": layout, "case": case.title, "real": real, "predicted": predicted})
    for metric, (allowed, or_spread) in ALLOWED.items():
        values = [one[metric] for one in real]
        middle = median(values)
        spread = (max(values) - min(values)) / middle if middle else 0.0
        if metric == "hit_ratio":
            error, unit = abs(predicted[metric] - middle) * 100, "points"
        else:
            error, unit = abs(predicted[metric] / middle - 1) * 100, "%"
        if or_spread:
            allowed = max(allowed, 100 * spread)
        notes = f"real {middle:.4g}, predicted {predicted[metric]:.4g}, spread of {len(real)} real runs {spread:.0%}"
        report.results.append(_against(f"{layout}: {case.title}", f"error of {metric}", unit, error, allowed, notes))


def _median(case: str, results: Sequence[Result]) -> Result:
    """Return the median of the errors of all medians."""
    errors = [one.value for one in results if one.metric in MEDIANS]
    return _against(case, "median error of the medians", "%", median(errors), 8.0, "")


def _against(case: str, metric: str, unit: str, error: float, allowed: float, notes: str) -> Result:
    """Return an error beside the largest one that is allowed."""
    value = max(_LEAST_ERROR, round(error, 2))
    return Result(
        case,
        metric,
        unit,
        value,
        competitor="allowed",
        competitor_value=round(allowed, 2),
        comparison="baseline",
        notes=notes,
        target=1.0,
    )

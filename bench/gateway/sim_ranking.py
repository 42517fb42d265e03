"""The order in which the simulator puts 12 real fleets on two cores, beside the order of their real runs.

The fleets were chosen before the first run. They differ in the number and the roles of the workers, KV memory, batch size, step
size and routing policy, and all get the same load of agents. The workers are calibrated once, in the first fleet. The order is
that of the mean time of a request. Kendall's tau compares both orders, over all pairs of fleets. The pick is the fleet that the
simulator puts first. SmolLM2 runs on the CPU, so that the machine must be otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean

from bench.contract import Needs, Report, Result
from bench.support.cpu_fleet import (
    AgentLoad,
    FleetShape,
    calibrate,
    play_load,
    predict_load,
    real_gateway,
    real_workers,
    write_trace,
)

NAME = "sim_ranking"
HELP = "the order in which stoker sim puts 12 real fleets on two cores, beside the order of their real runs"
NEEDS = Needs(packages=("torch", "aiohttp", "msgspec"))
LOAD = AgentLoad("ranking", sessions=10, turns=3, system=192, step=128, out=24, think_s=0.2, concurrency=5)
ONE, TWO, PAIR = ("unified",), ("unified", "unified"), ("prefill", "decode")
FLEETS = {
    "2 unified": FleetShape(TWO),
    "2 unified, random routing": FleetShape(TWO, policy="random"),
    "2 unified, 80 blocks": FleetShape(TWO, kv_blocks=80),
    "2 unified, 80 blocks, random routing": FleetShape(TWO, kv_blocks=80, policy="random"),
    "2 unified, batch of 1": FleetShape(TWO, max_rows=1),
    "2 unified, steps of 32 tokens": FleetShape(TWO, step_tokens=32),
    "1 prefill, 1 decode": FleetShape(PAIR),
    "1 prefill, 1 decode, 80 blocks": FleetShape(PAIR, kv_blocks=80),
    "1 unified": FleetShape(ONE),
    "1 unified, 80 blocks": FleetShape(ONE, kv_blocks=80),
    "1 unified, batch of 1": FleetShape(ONE, max_rows=1),
    "1 unified, batch of 2": FleetShape(ONE, max_rows=2),
}
METRIC = "e2e_mean_ms"
TARGET_TAU, TARGET_PICK = 0.8, 1 / 1.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=1, help="real runs of each fleet (default: %(default)s)")
    parser.add_argument("--fleets", nargs="+", choices=tuple(FLEETS), default=list(FLEETS), help="default: all")


def run(args: argparse.Namespace) -> Report:
    from stoker import __version__
    from stoker.sim.calibration import read_calibration

    report = Report(details=[])
    real: dict[str, float] = {}
    predicted: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        both = FleetShape(TWO)
        with real_workers(both, scratch) as workers, real_gateway(both, workers, scratch) as fleet:
            calibration = read_calibration(calibrate(fleet, both, scratch, LOAD.concurrency), __version__)
        traces = [write_trace(LOAD, number, scratch) for number in range(args.repeats)]
        for name in args.fleets:
            shape = FLEETS[name]
            runs = []
            with real_workers(shape, scratch) as workers:
                for trace in traces:
                    with real_gateway(shape, workers, scratch) as fleet:
                        runs.append(play_load(LOAD, trace, fleet))
            expected = predict_load(LOAD, shape, calibration, traces)
            real[name], predicted[name] = fmean(one[METRIC] for one in runs), expected[METRIC]
            report.details.append({"fleet": name, "real": runs, "predicted": expected})
            print(json.dumps(report.details[-1]), flush=True)
    for name, value in real.items():
        error = predicted[name] / value - 1
        notes = f"predicted {predicted[name]:.0f}, {error:+.0%}"
        report.results.append(Result(name, "mean time of a request", "ms", round(value, 1), notes=notes))
    report.results += judged(real, predicted)
    return report


def judged(real: dict[str, float], predicted: dict[str, float]) -> list[Result]:
    """Compare the orders, and the fleet that is predicted to be the best with the one that is."""
    tau = kendall_tau([real[name] for name in real], [predicted[name] for name in real])
    picked = min(predicted, key=predicted.__getitem__)
    best = min(real, key=real.__getitem__)
    order = Result(
        f"{len(real)} fleets",
        "Kendall's tau of the predicted order",
        "",
        round(tau, 3),
        better="higher",
        competitor="the real order",
        competitor_value=1.0,
        comparison="baseline",
        target=TARGET_TAU,
    )
    pick = Result(
        f"{len(real)} fleets",
        "mean time of a request on the picked fleet",
        "ms",
        round(real[picked], 1),
        competitor="the best fleet",
        competitor_value=round(real[best], 1),
        comparison="baseline",
        notes=f"picked: {picked}; best: {best}",
        target=TARGET_PICK,
    )
    return [order, pick]


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the pairs in the same order minus those in the opposite order, of all pairs. A tie in one of them counts as
    neither."""
    pairs = list(combinations(range(len(first)), 2))
    if not pairs:
        return 1.0
    agreement = 0
    for i, j in pairs:
        product = (first[i] - first[j]) * (second[i] - second[j])
        agreement += (product > 0) - (product < 0)
    return agreement / len(pairs)

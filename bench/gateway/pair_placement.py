"""Where two gateways behind HAProxy place agent sessions, beside one gateway: hit ratio and skew.

    python -m bench run pair_placement --seed 7 --seed 8

The sessions are those of `placement`. The workers (bench/support/publishing_worker.py) publish what Stoker workers do, because that
is all that gateways know of each other's requests. HAProxy (examples/haproxy.cfg) sends a request to the gateway with the fewest
connections, so the turns of a session go through both. For every cell the gateways are started, driven once and stopped.

Target: the skew of two gateways is at most the skew of one, plus 0.05.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.contract import Needs, Report, Result
from bench.support.gateway_pair import check_installed, gateway_pair
from bench.support.placement_load import CASES, played
from bench.support.processes import free_ports, python_module, started, wait_for_port

NAME = "pair_placement"
HELP = "hit ratio and load skew of agent sessions through two gateways behind HAProxy, beside one gateway"
NEEDS = Needs(packages=("aiohttp", "msgspec", "uvloop", "tokenizers"), programs="haproxy")
_MORE_SKEW = 0.05
_SETTLE_S = 1.0  # the gateways subscribe to the workers' events


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", action="append", choices=tuple(CASES), help="default: all; may be repeated")
    parser.add_argument("--seed", type=int, action="append", help="default: 7; may be repeated")
    parser.add_argument("--log-dir", type=Path, default=Path("build/pair_placement"), help="default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    check_installed()
    ports = free_ports(4)
    rows: list[dict[str, Any]] = []
    with started(python_module("bench.support.publishing_worker", *ports), args.log_dir / "workers.log"):
        for port in ports:
            wait_for_port(port, 60)
        for case in args.case or CASES:
            for seed in args.seed or [7]:
                for gateways in (1, 2):
                    rows.append({"gateways": gateways, **_measure(gateways, case, seed, ports, args.log_dir)})
                    print(json.dumps(rows[-1]), flush=True)
    problems = [f"{row['gateways']} gateways: {row['error']}" for row in rows if "error" in row]
    results, wide = _results([row for row in rows if "error" not in row])
    return Report(results, rows, problems + wide)


def _measure(gateways: int, case: str, seed: int, ports: Sequence[int], log_dir: Path) -> dict[str, Any]:
    config = "".join(f'[[worker]]\nurl = "http://127.0.0.1:{port}"\n' for port in ports)
    with gateway_pair("sqlite", config, log_dir) as pair:
        for gateway in pair.gateways:
            gateway.wait_until_usable(len(ports))
        time.sleep(_SETTLE_S)
        # One gateway is driven without HAProxy, and the other one is idle.
        port = pair.port if gateways == 2 else pair.gateways[0].port
        return played(f"http://127.0.0.1:{port}", ports, case, seed)


def _results(rows: Sequence[dict[str, Any]]) -> tuple[list[Result], list[str]]:
    """Return medians over the seeds, and which cases miss the target."""

    def median(case: str, gateways: int, metric: str) -> float:
        return statistics.median(row[metric] for row in rows if (row["case"], row["gateways"]) == (case, gateways))

    results, problems = [], []
    for case in dict.fromkeys(row["case"] for row in rows):
        if {row["gateways"] for row in rows if row["case"] == case} != {1, 2}:
            continue
        for metric, text, unit in (("hit", "hit ratio", "share"), ("skew", "skew", "x mean")):
            one, two = median(case, 1, metric), median(case, 2, metric)
            better = "higher" if metric == "hit" else "lower"
            results.append(Result(f"{case}, two gateways", text, unit, two, better, "one gateway", one, "baseline"))  # type: ignore[arg-type]
            if metric == "skew" and two > one + _MORE_SKEW:
                problems.append(f"{case}: the skew of two gateways is {two:.3f}, of one {one:.3f}")
    return results, problems

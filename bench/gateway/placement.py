"""Where routers place agent sessions: hit ratio and skew over mock workers with real prefix caches.

    python -m bench run placement --router stoker --header stoker=x-session-affinity --router smg --router vllm-router \\
        --seed 7 --seed 8

All routers are measured in one run. For every cell the router is started, driven once and stopped, so it is always
cold. The sessions and the workers are those of bench/support/placement_load.py: A1 has a common prompt of 16 KB, turns
of 1.5 to 7 KB and all sessions at once; A2 64 KB and 0.4 to 2.5 KB; A3 is A2 with a session every 150 ms. Skew is the
number of requests of the busiest worker over the mean. The routers run with their default policies.

Targets for Stoker: hit ratio at least 0.90, 0.97 and 0.97; skew at most 1.15 without a session header, 1.10 with one.
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
from bench.support import routers
from bench.support.placement_load import CASES, played
from bench.support.processes import (
    free_port,
    free_ports,
    named_values,
    python_module,
    started,
    wait_for_port,
)
from bench.support.router_client import wait_until_answering

NAME = "placement"
HELP = "hit ratio and load skew of agent sessions through routers, over mock workers with prefix caches"
NEEDS = Needs(packages=("aiohttp", "msgspec", "uvloop"), programs="the routers to compare with, on PATH")
_LOAD = "bench.support.placement_load"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--router", action="append", default=[], metavar="NAME[=COMMAND]", help="default: stoker; may be repeated"
    )
    parser.add_argument(
        "--header", action="append", default=[], metavar="NAME=HEADER", help="also measure with this session header"
    )
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="NAME=TEXT",
        help="a router's name in the results, with its version",
    )
    parser.add_argument("--case", action="append", choices=tuple(CASES), help="default: all; may be repeated")
    parser.add_argument("--seed", type=int, action="append", help="default: 7; may be repeated")
    parser.add_argument("--log-dir", type=Path, default=Path("build/placement"), help="default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    commands = routers.parse(args.router or ["stoker"])
    headers = named_values(args.header, "--header")
    ports = free_ports(4)
    rows: list[dict[str, Any]] = []
    with started(python_module(_LOAD, "workers", *ports), args.log_dir / "workers.log"):
        for port in ports:
            wait_for_port(port)
        for name, command in commands.items():
            for header in [None, headers[name]] if name in headers else [None]:
                for case in args.case or CASES:
                    for seed in args.seed or [7]:
                        row = {"router": name, "header": header or "", "case": case, "seed": seed}
                        row |= _measure(name, command, header, case, seed, ports, args.log_dir)
                        rows.append(row)
                        print(json.dumps(row), flush=True)
    failed = [f"{row['router']} {row['case']}: {row['error']}" for row in rows if "error" in row]
    return Report(_results(rows, named_values(args.label, "--label")), rows, failed)


def _measure(
    name: str, command: str, header: str | None, case: str, seed: int, ports: Sequence[int], log_dir: Path
) -> dict[str, Any]:
    port = free_port()
    urls = [f"http://127.0.0.1:{worker}" for worker in ports]
    words = routers.fill(command, port, urls, log_dir)
    if name == "stoker" and command == routers.COMMANDS["stoker"]:
        words += ["--store", "none"]
    with started(words, log_dir / f"{name}.log"):
        wait_until_answering(port, "mock", 60)
        time.sleep(1.0)
        return played(f"http://127.0.0.1:{port}", ports, case, seed, header)


def _results(rows: Sequence[dict[str, Any]], labels: dict[str, str]) -> list[Result]:
    """Medians over the seeds. Stoker is compared with every other router, as it runs without a header."""
    good = [row for row in rows if "error" not in row]

    def median(router: str, header: str, case: str, metric: str) -> float | None:
        same = [row[metric] for row in good if (row["router"], row["header"], row["case"]) == (router, header, case)]
        return statistics.median(same) if same else None

    names = dict.fromkeys(row["router"] for row in good)
    others = [name for name in names if name != "stoker"] or [""]
    results = []
    for header, case in dict.fromkeys((row["header"], row["case"]) for row in good if row["router"] == "stoker"):
        label = f"{case}, {header or 'no session header'}"
        for metric, text, better in (("hit", "hit ratio", "higher"), ("skew", "skew", "lower")):
            value = median("stoker", header, case, metric)
            assert value is not None
            for other in others:
                theirs = median(other, "", case, metric) if other else None
                unit = "share" if metric == "hit" else "x mean"
                results.append(Result(label, text, unit, value, better, labels.get(other, other), theirs))  # type: ignore[arg-type]
    return results

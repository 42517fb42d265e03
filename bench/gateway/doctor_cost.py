"""What the cache doctor costs the gateway: CPU time for each request with and without the reasons of uncached tokens.

    python -m bench run doctor_cost --rounds 6

Two gateways stand before the same mock workers, one of them without the doctor (bench/support/gateway_without_reasons.py). They
get the same load in turns, in alternating order, and the CPU time of each is read for its own turns only. There are two loads:

- sessions of agents over workers that publish KV events (bench/support/publishing_worker.py), so that every reason occurs;
- short prompts with whole answers in a closed loop, as in `router_overhead`.

The target is at most 1.03 times the CPU time.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.contract import BenchmarkError, Needs, Report, Result
from bench.support.placement_load import CASES, MODEL, played
from bench.support.processes import cpu_s, free_ports, python_module, started, stoker_command, wait_for_port
from bench.support.router_client import closed_loop, wait_until_answering

NAME = "doctor_cost"
HELP = "CPU time of the gateway with and without the reasons why prompts were not cached"
NEEDS = Needs(packages=("aiohttp", "msgspec", "uvloop", "tokenizers"))
MOST = 1.03
START_S = 60.0
ARMS = ("with", "without")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=6, help="of each load (default: %(default)s)")
    parser.add_argument("--case", choices=tuple(CASES), default="A1", help="sessions to play (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of the short prompts (default: %(default)s)")
    parser.add_argument("--connections", type=int, default=16, help="of the short prompts (default: %(default)s)")
    parser.add_argument("--log-dir", type=Path, default=Path("build/doctor_cost"), help="default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    def sessions(port: int, workers: Sequence[int], number: int) -> int:
        found = played(f"http://127.0.0.1:{port}", workers, args.case, 7 + number)
        if "error" in found:
            raise BenchmarkError(f"the sessions failed: {found['error']}")
        return int(found["requests"])

    def short_prompts(port: int, workers: Sequence[int], number: int) -> int:
        counted = closed_loop(port, args.connections, args.seconds, "full", MODEL)
        return int(counted["requests"])

    loads = {
        f"sessions {args.case}": _measure(args, "bench.support.publishing_worker", "", sessions),
        "short prompts": _measure(args, "bench.support.mock_worker", ",dialect=openai", short_prompts),
    }
    results, problems = [], []
    for case, rounds in loads.items():
        ours, baseline = (statistics.median(one[arm] for one in rounds) for arm in ARMS)
        more = statistics.median(one["with"] / one["without"] for one in rounds)
        notes = f"median of {len(rounds)} rounds: {more:.3f}x"
        compared: dict[str, Any] = {"competitor": "without reasons", "comparison": "baseline", "target": 1 / MOST}
        results.append(Result(case, "CPU per request", "us", ours, competitor_value=baseline, notes=notes, **compared))
        if more > MOST:
            problems.append(f"{case}: {more:.3f} times the CPU time, and the target is {MOST}")
    return Report(results, loads, problems)


def _measure(
    args: argparse.Namespace, worker: str, suffix: str, load: Callable[[int, Sequence[int], int], int]
) -> list[dict[str, float]]:
    """Return the CPU time of each arm for a request, in microseconds, for each round."""
    *ports, first, second = free_ports(4)
    fronts = dict(zip(ARMS, (first, second), strict=True))
    programs = {"with": stoker_command(), "without": shlex.join(python_module("bench.support.gateway_without_reasons"))}
    urls = " ".join(f"--worker http://127.0.0.1:{port}{suffix}" for port in ports)
    rounds: list[dict[str, float]] = []
    with ExitStack() as running:
        log = args.log_dir / f"{worker.rpartition('.')[2]}.log"
        for words in [ports] if worker.endswith("publishing_worker") else [[port] for port in ports]:
            running.enter_context(started(python_module(worker, *words), log))
        for port in ports:
            wait_for_port(port, START_S)
        gateways = {}
        for arm in ARMS:
            command = f"{programs[arm]} gateway --port {fronts[arm]} {urls} --store {args.log_dir / arm}.db"
            gateways[arm] = running.enter_context(started(shlex.split(command), args.log_dir / f"{arm}.log"))
        for arm in ARMS:
            wait_until_answering(fronts[arm], MODEL, START_S)
            load(fronts[arm], ports, -1)
        for number in range(args.rounds):
            found = {}
            for arm in ARMS if number % 2 == 0 else reversed(ARMS):
                before_s = cpu_s(gateways[arm].pid)
                count = load(fronts[arm], ports, number)
                found[arm] = (cpu_s(gateways[arm].pid) - before_s) / count * 1e6
            rounds.append(found)
            print(json.dumps(found), flush=True)
    return rounds

"""The numbers of prefill and decode workers that `stoker plan --trace` picks, beside an exhaustive search.

Three public traces are planned for twice: with the search that `stoker plan --trace` uses, and with every split of every number
of workers (`--exhaustive`). The worker is the estimate of `sim_experiments`. The goal is 2 s to the first token and 50 ms between
tokens for 95% of the requests. The traces are replayed at speeds at which one worker is not enough, and up to --max-workers are.
Workers take prompts of any length, because some sessions of agents are longer than the model's context.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench.contract import Needs, Report, Result

if TYPE_CHECKING:
    from stoker.sim.fleet_search import SearchResult
    from stoker.sim.workloads.workload import Workload

NAME = "sim_split"
HELP = "prefill and decode workers that stoker plan --trace picks, beside an exhaustive search, on three traces"
FILES = {
    "mooncake": "traces/mooncake_conversation.jsonl.gz",
    "azure": "traces/azure2023_code.csv.gz",
    "agents": "traces/claude_code_sessions.jsonl.gz",
}
NEEDS = Needs(packages=("msgspec",), data=tuple(FILES.values()))
SPEEDUPS = {"mooncake": 1.2, "azure": 2.0, "agents": 4.0}
_ANY_LENGTH = 1 << 20
TARGET = 0.9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--traces", nargs="+", choices=tuple(FILES), default=list(FILES), help="default: all")
    parser.add_argument("--num-requests", type=int, default=400, help="of each trace (default: %(default)s)")
    parser.add_argument("--max-workers", type=int, default=8, help="of 8 GPUs each (default: %(default)s)")


def run(args: argparse.Namespace) -> Report:
    from msgspec import structs

    from bench.gateway._sim_experiments import GOAL, GOAL_SHARE
    from bench.support.estimated_worker import kimi_k25
    from stoker.sim.fleet_search import FleetOption, FleetSearch, SearchGoal

    estimate = kimi_k25()
    shape = structs.replace(estimate.shape, max_model_tokens=_ANY_LENGTH)
    calibration = structs.replace(estimate, shape=shape)
    option = FleetOption(calibration)
    goal = SearchGoal(GOAL, GOAL_SHARE)
    report = Report(details=[])
    for name in args.traces:
        load = _workload(name, args.data / FILES[name], args.num_requests)
        found: dict[str, SearchResult] = {}
        for title, exhaustive in (("search", False), ("exhaustive search", True)):
            max_gpus = args.max_workers * calibration.shape.gpus
            found[title] = FleetSearch(load, goal, max_gpus, lambda one: None, exhaustive=exhaustive).run([option])
            for one in found[title].tried:
                row = {"trace": name, "search": title, "fleet": one.words(), "good_share": one.good_share}
                report.details.append(row)
        _judge(name, found["search"], found["exhaustive search"], report)
    return report


def _workload(name: str, path: Path, num_requests: int) -> Workload:
    from stoker.sim.workloads.agent_sessions import AgentSessions
    from stoker.sim.workloads.azure import AzureTrace
    from stoker.sim.workloads.mooncake import MooncakeTrace

    if name == "mooncake":
        return MooncakeTrace(path, num_requests, SPEEDUPS[name])
    if name == "azure":
        return AzureTrace(path, num_requests, SPEEDUPS[name])
    return AgentSessions(path, num_requests, SPEEDUPS[name])


def _judge(name: str, searched: SearchResult, exhaustive: SearchResult, report: Report) -> None:
    """Compare the picks. Where no fleet keeps the goal, the best share of good requests is compared."""
    counts = f"{len(searched.tried)} simulations against {len(exhaustive.tried)}"
    if searched.picked is None or exhaustive.picked is None:
        best, most = (max(one.tried, key=lambda fleet: fleet.good_share) for one in (searched, exhaustive))
        notes = f"no fleet keeps the goal; {best.words()} against {most.words()}; {counts}"
        values = (100 * best.good_share, 100 * most.good_share)
        result = Result(name, "requests that keep the goal", "%", values[0], "higher", "exhaustive search", values[1])
    else:
        notes = f"{searched.picked.words()} against {exhaustive.picked.words()}; {counts}"
        values = (searched.picked.gpus, exhaustive.picked.gpus)
        result = Result(name, "GPUs of the picked fleet", "GPUs", values[0], "lower", "exhaustive search", values[1])
    report.results.append(replace(result, comparison="baseline", notes=notes, target=TARGET))
    if (result.ratio or 0.0) < TARGET:
        report.problems.append(f"{name}: the pick is more than 10% worse than that of the exhaustive search")

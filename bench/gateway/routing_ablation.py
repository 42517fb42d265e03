"""Routing ablation: what each term of the routing cost and each placement rule contributes.

For each variant, one term or rule of the `cost` policy is switched off, and the same cases run in virtual time through the
real Router:

  placement   agent sessions A1 to A3, without and with a session key: hit ratio and skew (see placement_simulation)
  chat        Mooncake's conversation trace on 4 and 8 workers: hit ratio and mean wait (see trace_replay)
  agents      Claude Code sessions on 8 workers, with session ids where caches are unbounded
  decode      the conversation trace with outputs, on equal and on uneven workers (see bench/support/decode_model.py)
  tiers       the conversation trace with small GPU caches over a slower shared store

The numbers go to --details (bench/results/details/routing_ablation.json holds the current ones); docs/routing.md has
the table.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import mean
from typing import Any
from unittest.mock import patch

from bench.contract import Needs, Report
from bench.gateway import placement_simulation, trace_replay
from bench.support import placement_load, trace_model
from bench.support.decode_model import DecodeModel, two_tiers
from bench.support.trace_model import PolicyOutcome, TraceRequest
from stoker.routing import cost as cost_module
from stoker.routing.candidate import Candidate, PrefixInfo
from stoker.routing.cost import Scene
from stoker.routing.policies import cost as policy_module
from stoker.routing.query import Reason, RouteQuery
from stoker.routing.router import PrefixIndexes, Router
from stoker.routing.settings import CostSettings, RouterSettings

NAME = "routing_ablation"
HELP = "hit ratio, skew and waits with each term of the routing cost switched off, in virtual time"
NEEDS = Needs(data=tuple(trace_replay.TRACES.values()))
CASES = ("placement", "chat", "agents", "decode", "tiers")
Results = dict[str, float]
Variant = tuple[dict[str, Callable[..., Any]], dict[str, float]]  # replaced functions of the policy, changed settings


def without_term(name: str) -> Variant:
    def costs(query: RouteQuery, candidates: Sequence[Candidate], scene: Scene) -> list[Reason]:
        changes: dict[str, Any] = {name: 0.0}
        reasons = cost_module.costs(query, candidates, scene)
        return [one._replace(cost_s=one.cost_s - getattr(one, name), **changes) for one in reasons]

    return {"costs": costs}, {}


def changed_scene(**changes: Any) -> Variant:
    def build(query: RouteQuery, candidates: Sequence[Candidate], prefix: PrefixInfo, settings: CostSettings) -> Scene:
        return replace(cost_module.build_scene(query, candidates, prefix, settings), **changes)

    return {"build_scene": build}, {}


def changed_prefix(**changes: Any) -> Variant:
    def build(query: RouteQuery, candidates: Sequence[Candidate], prefix: PrefixInfo, settings: CostSettings) -> Scene:
        return cost_module.build_scene(query, candidates, replace(prefix, **changes), settings)

    return {"build_scene": build}, {}


def one_branch() -> Variant:
    def build(query: RouteQuery, candidates: Sequence[Candidate], prefix: PrefixInfo, settings: CostSettings) -> Scene:
        scene = cost_module.build_scene(query, candidates, prefix, settings)
        return replace(scene, move_factor=settings.move_factor)

    return {"build_scene": build}, {}


def without_rule(*names: str) -> Variant:
    return {name: lambda *_: None for name in names}, {}


def with_settings(**changes: float) -> Variant:
    return {}, changes


VARIANTS: Mapping[str, Variant] = {
    "nothing": ({}, {}),
    "queue_s": without_term("queue_s"),
    "compute_s": without_term("compute_s"),
    "fetch_s": without_term("fetch_s"),
    "decode_s": without_term("decode_s"),
    "kv_s": without_term("kv_s"),
    "others_s: decoding sequences": with_settings(stall_share=0.0),
    "others_s: returning requests": with_settings(returns_weight=0.0),
    "later_s": without_term("later_s"),
    "later_s: learned number of turns": with_settings(most_later_turns=0.6),
    "later_s: limit of 20 turns": with_settings(most_later_turns=1e9),
    "recent_s": without_term("recent_s"),
    "recent_s: tokens": with_settings(recent_weight=0.0),
    "recent_s: caches with room": changed_prefix(evicting=1.0),
    "recent_s: requests": with_settings(request_s=0.0),
    "move_s": without_term("move_s"),
    "move_s: branches": one_branch(),
    "idle fleets treated as busy": changed_scene(idle=False),
    "busy fleets treated as idle": changed_scene(idle=True),
    "relieve": without_rule("relieve"),
    "find_home": without_rule("find_home"),
    "even_out": without_rule("even_out"),
    "balance budget": with_settings(balance_share=1.0),
    "balance_part": with_settings(balance_part=1e9),
    "balance_s": with_settings(balance_s=1e9),
    "bound_requests": with_settings(bound_requests=0.0),
    "even_s": with_settings(even_s=0.0),
    "move_share": with_settings(move_share=1e9),
}


class AblationCases:
    """The traces, read once, and the cases on them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.seeds = [int(seed) for seed in args.seeds.split(",")]
        self.starts = [int(start) for start in args.starts.split(",")]
        self.chats = trace_model.read_mooncake(args.data / trace_replay.TRACES["mooncake"])
        self.agent_trace: list[TraceRequest] = []
        if "agents" in args.cases:
            path = args.data / trace_replay.TRACES["sessions"]
            self.agent_trace = trace_model.read_sessions(path)[: args.agent_requests]

    def placement(self, settings: RouterSettings) -> Results:
        results: Results = {}
        for with_key in (False, True):
            skews = []
            for case in placement_load.CASES:
                outcomes = []
                for seed in self.seeds:
                    run = placement_simulation.Simulation(
                        case, seed, with_session=with_key, policy="cost", noise_s=0.004
                    )
                    run.router = Router(run.fleet, run.load_book, PrefixIndexes(), settings=settings)
                    outcomes.append(run.placement())
                label = f"{case} {'key' if with_key else 'no key'}"
                results[f"{label} hit"] = mean(one.hit for one in outcomes)
                results[f"{label} skew"] = mean(one.skew for one in outcomes)
                skews.append(results[f"{label} skew"])
            results[f"worst skew {'key' if with_key else 'no key'}"] = max(skews)
        return results

    def chat(self, settings: RouterSettings) -> Results:
        results: Results = {}
        rows = ((4, 4000), (8, 4000), (8, math.inf))
        for nodes, capacity in rows:
            runs = [self._replay(self.chats[start:], nodes, capacity, settings) for start in self.starts]
            results[f"chat {nodes}/{capacity} hit"] = mean(run.hit for run in runs)
            results[f"chat {nodes}/{capacity} wait"] = mean(run.mean_wait_s for run in runs)
        for metric in ("hit", "wait"):
            results[f"chat {metric}"] = mean(results[f"chat {nodes}/{capacity} {metric}"] for nodes, capacity in rows)
        return results

    def agents(self, settings: RouterSettings) -> Results:
        bounded = self._replay(self.agent_trace, 8, 4000, settings)
        unbounded = self._replay(self.agent_trace, 8, math.inf, settings, session_ids=True)
        return {
            "agents bounded hit": bounded.hit,
            "agents bounded wait": bounded.mean_wait_s,
            "agents unbounded hit": unbounded.hit,
            "agents unbounded wait": unbounded.mean_wait_s,
        }

    def decode(self, settings: RouterSettings) -> Results:
        results: Results = {}
        parts = [self.chats[start : start + 3000] for start in (0, 3000, 6000, 9000)]
        for name, uneven in (("equal", False), ("uneven", True)):
            runs = [DecodeModel(part, 8, settings, uneven=uneven).run() for part in parts]
            results[f"{name} ttft"] = mean(run.ttft_s for run in runs)
            results[f"{name} total"] = mean(run.total_s for run in runs)
        return results

    def tiers(self, settings: RouterSettings) -> Results:
        return {"tiers wait": mean(two_tiers(self.chats[start:], 8, settings) for start in self.starts[:2])}

    def _replay(
        self,
        trace: Sequence[TraceRequest],
        nodes: int,
        capacity: float,
        settings: RouterSettings,
        session_ids: bool = False,
    ) -> PolicyOutcome:
        return trace_replay.replay(
            trace, nodes, capacity, shared=False, session_ids=session_ids, settings=settings, lru=False
        )


def measure(bench: AblationCases, cases: Sequence[str], variant: Variant) -> Results:
    """Run the cases with a variant of the policy."""
    functions, changes = variant
    settings = RouterSettings(cost=replace(CostSettings(), **changes))
    results: Results = {}
    with ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(patch.object(policy_module, name, function))
        for case in cases:
            results |= getattr(bench, case)(settings)
    return results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument("--only", action="append", metavar="VARIANT", help="run only this variant; may be repeated")
    parser.add_argument("--seeds", default="7,1,2", help="seeds of the placement cases (default: %(default)s)")
    parser.add_argument("--starts", default="0", help="requests to leave out at the start of the chat trace")
    parser.add_argument("--agent-requests", type=int, default=8000, help="requests of the agents trace to replay")


def run(args: argparse.Namespace) -> Report:
    cases, found = AblationCases(args), dict[str, Results]()
    for name, variant in VARIANTS.items():
        if not args.only or name in args.only:
            begin_s = time.process_time()
            found[name] = measure(cases, args.cases, variant)
            print(f"{name}: {time.process_time() - begin_s:.1f} s of CPU time", flush=True)
    return Report(details=found)

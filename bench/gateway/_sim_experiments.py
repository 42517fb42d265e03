"""The experiments of the benchmark `sim_experiments`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from bench.contract import Report, Result
from bench.support.agent_mix import AgentMix, Headers
from bench.support.estimated_worker import kimi_k25
from stoker.routing.candidate import Candidate, PrefixInfo
from stoker.routing.policies.consistent_hash import ConsistentHash
from stoker.routing.policies.least_tokens import LeastTokens
from stoker.routing.policy import POLICIES
from stoker.routing.query import Reason, RouteQuery
from stoker.routing.settings import RouterSettings
from stoker.sim.calibration import Calibration
from stoker.sim.simulation import SimConfig, SimFleet, SimOutcome, Simulation
from stoker.sim.summary import LatencyGoal, SimSummary, keeps_itl, keeps_ttft, summarize

RATE = 1.0  # sessions per second for each worker
WORKERS = 8
GOAL = LatencyGoal(ttft_s=2.0, itl_s=0.05)
GOAL_SHARE = 0.95
_RATES = (0.5, 1.0, 2.0)
_SPLITS = (2, 4)  # prefill workers of eight
_COST_RATES = tuple(0.25 * step for step in range(1, 33))  # sessions per second for each worker
_SHARED_GIB = 8192.0
_WHOLE_PROMPTS = 131_072


class HeaderOrTokens(LeastTokens):
    """A load balancer that knows no KV. Sessions with a key stay on one worker; the others go to the least loaded one."""

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(settings)
        self._sticky = ConsistentHash(settings)

    def score(self, query: RouteQuery, candidates: Sequence[Candidate], prefix: PrefixInfo, now: float) -> list[Reason]:
        policy = super() if query.session is None else self._sticky
        return policy.score(query, candidates, prefix, now)


class Experiments:
    """Runs the experiments, and adds to a report."""

    def __init__(self, arrivals_s: float, max_workers: int, gpu_hour_price: float, report: Report) -> None:
        self._arrivals_s = arrivals_s
        self._max_workers = max_workers
        self._price = gpu_hour_price
        self._report = report
        self._calibration = kimi_k25()
        if "header_or_tokens" not in POLICIES:
            POLICIES.register("header_or_tokens")(HeaderOrTokens)

    def _simulate(
        self,
        fleet: SimFleet,
        load: AgentMix,
        policy: str = "cost",
        calibration: Calibration | None = None,
        **note: Any,
    ) -> tuple[SimOutcome, SimSummary]:
        config = SimConfig(calibration or self._calibration, fleet, router=RouterSettings(policy=policy))
        outcome = Simulation(config).run(load)
        found = summarize(outcome, GOAL, self._price)
        row = {**note, "workers": fleet.num_workers, "policy": policy, "rate": load.rate, "requests": found.requests}
        row |= {"hit_ratio": found.hit_ratio, "ttft_p90_ms": found.ttft_ms.p90, "itl_p90_ms": found.itl_ms.p90}
        row |= {"busy": sum(found.utilisation.values()) / fleet.num_workers, "outcomes": found.outcomes}
        self._report.details.append(row)
        print(json.dumps(row), flush=True)
        return outcome, found

    def _load(self, num_workers: int, rate: float = RATE, headers: Headers = "all") -> AgentMix:
        return AgentMix(rate=rate * num_workers, arrivals_s=self._arrivals_s, headers=headers)

    def _add(self, case: str, metric: str, unit: str, value: float, better: Any = "lower", notes: str = "") -> None:
        self._report.results.append(Result(case, metric, unit, value, better, notes=notes))

    # ---- the experiments

    def headers(self) -> None:
        """Hit ratio by the sessions that send a header, without a shared store."""
        cases: tuple[tuple[str, str, Headers], ...] = (
            ("balanced by tokens, no headers", "header_or_tokens", "none"),
            ("balanced by tokens, headers of heavy sessions", "header_or_tokens", "heavy"),
            ("balanced by tokens, headers of all sessions", "header_or_tokens", "all"),
            ("cost policy, no headers", "cost", "none"),
            ("cost policy, headers of all sessions", "cost", "all"),
        )
        for num_workers in (size for size in (4, 8, 16) if size <= self._max_workers):
            for title, policy, headers in cases:
                load = self._load(num_workers, headers=headers)
                _, found = self._simulate(SimFleet(unified=num_workers), load, policy, experiment="headers", case=title)
                case = f"headers, {num_workers} workers: {title}"
                self._add(case, "token hit ratio", "%", 100 * found.hit_ratio, "higher")
                self._add(case, "uncached prompt tokens", "%", 100 * (1 - found.hit_ratio))

    def disaggregation(self) -> None:
        """Time between tokens by load: whole prompts, chunked prefill, and divided workers, on the same GPUs."""
        shape = msgspec.structs.replace(self._calibration.shape, step_tokens=_WHOLE_PROMPTS, target_itl_s=1e3)
        whole = msgspec.structs.replace(self._calibration, shape=shape)
        num_workers = min(WORKERS, self._max_workers)
        unified = SimFleet(unified=num_workers)
        layouts: list[tuple[str, SimFleet, Calibration | None]] = [
            ("unified, whole prompts", unified, whole),
            ("unified, chunked prefill", unified, None),
        ]
        for split in (one for one in _SPLITS if one < num_workers):
            fleet = SimFleet(prefill=split, decode=num_workers - split)
            layouts.append((f"{split} prefill, {num_workers - split} decode", fleet, None))
        for rate in _RATES:
            for title, fleet, calibration in layouts:
                note = {"experiment": "disaggregation", "case": title}
                _, found = self._simulate(fleet, self._load(num_workers, rate), "cost", calibration, **note)
                case = f"disaggregation, {rate:g} sessions/s for each worker: {title}"
                self._add(case, "time between tokens, p90", "ms", found.itl_ms.p90 or 0.0)
                self._add(case, "time to first token, p90", "ms", found.ttft_ms.p90 or 0.0)

    def shared_store(self) -> None:
        """Hit ratio by policy, without and with a KV store that all workers share."""
        num_workers = min(WORKERS, self._max_workers)
        for title, gib in (("no shared store", 0.0), ("shared store", _SHARED_GIB)):
            for policy in ("random", "round_robin", "least_tokens", "cost"):
                fleet = SimFleet(unified=num_workers, shared_gib=gib)
                note = {"experiment": "shared_store", "case": title}
                _, found = self._simulate(fleet, self._load(num_workers), policy, **note)
                case = f"shared store, {num_workers} workers: {policy}, {title}"
                self._add(case, "token hit ratio", "%", 100 * found.hit_ratio, "higher")
                self._add(case, "time to first token, p90", "ms", found.ttft_ms.p90 or 0.0)

    def cost(self) -> None:
        """Cost by the size of the fleet, at the highest load of a grid that keeps the goal."""
        gpus = self._calibration.shape.gpus
        at = 7  # where the search starts; a fleet of another size keeps a similar load
        for num_workers in (size for size in (1, 2, 4, 8, 16, 32, 64) if size <= self._max_workers):
            tried: dict[int, tuple[float, float]] = {}
            while at not in tried:
                tried[at] = self._good_share(num_workers, _COST_RATES[at])
                is_good = tried[at][0] >= GOAL_SHARE
                at = min(len(_COST_RATES) - 1, at + 1) if is_good else max(0, at - 1)
            good = [i for i, (share, _) in tried.items() if share >= GOAL_SHARE]
            case = f"cost, {num_workers * gpus} GPUs"
            if not good:
                self._report.problems.append(f"{case}: no load of the grid keeps the goal")
                continue
            at = max(good)
            share, tokens_per_session = tried[at]
            tokens_per_s = _COST_RATES[at] * num_workers * tokens_per_session
            cost = num_workers * gpus * self._price / 3600 / tokens_per_s * 1e6
            notes = f"{_COST_RATES[at]:g} sessions/s for each worker, {share:.1%} of the requests keep the goal"
            self._add(case, "cost per million tokens", "$", cost, notes=notes)

    def _good_share(self, num_workers: int, rate: float) -> tuple[float, float]:
        """Return the share of requests after the warm-up that keep the goal, and the tokens of a session."""
        load = self._load(num_workers, rate)
        outcome, found = self._simulate(SimFleet(unified=num_workers), load, experiment="cost")
        records = outcome.records
        begin_s = self._arrivals_s / 2
        judged = [i for i in range(len(records)) if begin_s <= records.started_s[i] <= self._arrivals_s]
        num_good = sum(
            bool(records.is_ok[i] and keeps_ttft(GOAL, outcome, i) and keeps_itl(GOAL, outcome, i)) for i in judged
        )
        num_sessions = sum(1 for _ in load.sessions())
        return num_good / max(1, len(judged)), (found.prompt_tokens + found.output_tokens) / num_sessions

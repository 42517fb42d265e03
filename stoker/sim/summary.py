"""Summaries of simulations: percentiles, hit ratios, utilisation, goodput and cost, with the range of each prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from stoker.base.errors import ConfigError
from stoker.sim.simulation import SimConfig, SimOutcome, Simulation
from stoker.sim.workloads.workload import Workload

PERCENTILES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class LatencyGoal:
    """What a good answer keeps: the time to its first token, and its mean time between tokens."""

    ttft_s: float | None = None
    itl_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "itl_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"--goal-{name.removesuffix('_s')}-ms {value * 1e3:g}: must be above 0")


@dataclass(frozen=True, slots=True)
class SimTimes:
    """Mean and percentiles of a time in milliseconds. None: there were no samples."""

    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class SimSummary:
    """The results of one simulation."""

    requests: int
    outcomes: dict[str, int]
    duration_s: float
    ttft_ms: SimTimes
    itl_ms: SimTimes
    e2e_ms: SimTimes
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    hit_ratio: float  # cached prompt tokens of all prompt tokens
    hits_by_tier: dict[str, float]  # the same by where they were found
    goodput_per_s: float  # answered requests per second that keep the goal
    utilisation: dict[str, float]  # busy share of each worker
    gpu_hours: float
    cost_per_million_tokens: float | None  # of prompt and output tokens; None: no price was given
    preemptions: int
    outside_share: float  # steps beyond the calibrated bounds


def summarize(outcome: SimOutcome, goal: LatencyGoal, gpu_hour_price: float | None) -> SimSummary:
    records, duration_s = outcome.records, outcome.duration_s
    good = list(records.answered())
    ttft = sorted(records.ttft_s[i] for i in good)
    e2e = sorted(records.ended_s[i] - records.started_s[i] for i in good)
    prompt_tokens = sum(records.prompt_tokens[i] for i in good)
    output_tokens = sum(records.output_tokens[i] for i in good)
    cached = sum(records.cached_tokens[i] for i in good)
    engines = outcome.engines
    gpu_hours = len(engines) * outcome.config.calibration.shape.gpus * duration_s / 3600
    num_steps = sum(engine.device.num_steps for engine in engines)
    tokens = prompt_tokens + output_tokens
    cost = None if gpu_hour_price is None or not tokens else gpu_hours * gpu_hour_price / tokens * 1e6
    per_s = 1 / duration_s if duration_s else 0.0
    return SimSummary(
        requests=len(records),
        outcomes=dict(sorted(records.outcomes.items())),
        duration_s=duration_s,
        ttft_ms=_times(ttft),
        itl_ms=_gap_times(outcome),
        e2e_ms=_times(e2e),
        requests_per_s=len(good) * per_s,
        output_tokens_per_s=output_tokens * per_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        hit_ratio=cached / prompt_tokens if prompt_tokens else 0.0,
        hits_by_tier=_hits_by_tier(outcome, cached, prompt_tokens),
        goodput_per_s=sum(keeps_ttft(goal, outcome, i) and keeps_itl(goal, outcome, i) for i in good) * per_s,
        utilisation={str(engine.worker_id): engine.busy_s / duration_s if duration_s else 0.0 for engine in engines},
        gpu_hours=gpu_hours,
        cost_per_million_tokens=cost,
        preemptions=sum(engine.scheduler.counters.preemptions for engine in engines),
        outside_share=sum(engine.device.num_outside for engine in engines) / max(1, num_steps),
    )


def _times(ordered_s: Sequence[float]) -> SimTimes:
    if not ordered_s:
        return SimTimes(None, None, None, None, None)
    return SimTimes(fmean(ordered_s) * 1e3, *(quantile(ordered_s, share) * 1e3 for share in PERCENTILES))


def _gap_times(outcome: SimOutcome) -> SimTimes:
    gaps = outcome.records.gaps
    if not gaps.count:
        return SimTimes(None, None, None, None, None)
    return SimTimes(gaps.sum_s / gaps.count * 1e3, *((gaps.quantile_s(share) or 0.0) * 1e3 for share in PERCENTILES))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Interpolate linearly between the two nearest samples."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _hits_by_tier(outcome: SimOutcome, cached: int, prompt_tokens: int) -> dict[str, float]:
    hits: dict[str, int] = {}
    for tier in outcome.tiers:
        hits[tier.name] = hits.get(tier.name, 0) + tier.hit_tokens
    hits["device"] = max(0, cached - sum(hits.values()))
    return {name: count / prompt_tokens if prompt_tokens else 0.0 for name, count in sorted(hits.items())}


def keeps_ttft(goal: LatencyGoal, outcome: SimOutcome, i: int) -> bool:
    """Return True if the answer of request `i` began in time."""
    return goal.ttft_s is None or outcome.records.ttft_s[i] <= goal.ttft_s


def keeps_itl(goal: LatencyGoal, outcome: SimOutcome, i: int) -> bool:
    """Return True if the mean time between the tokens of request `i` is within the goal."""
    records = outcome.records
    if goal.itl_s is None or records.output_tokens[i] < 2:
        return True
    decode_s = records.ended_s[i] - records.started_s[i] - records.ttft_s[i]
    return bool(decode_s / (records.output_tokens[i] - 1) <= goal.itl_s)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A summary, and those of the fastest and the slowest worker that the calibration allows. None: not computed."""

    summary: SimSummary
    outcome: SimOutcome
    fast: SimSummary | None
    slow: SimSummary | None
    warnings: list[str]

    def range_of(self, *path: str) -> tuple[float, float] | None:
        """Return the range of a number, such as ("ttft_ms", "p50")."""
        if self.fast is None or self.slow is None:
            return None
        ends = []
        for one in (self.fast, self.summary, self.slow):
            value: Any = one
            for name in path:
                value = getattr(value, name)
            if value is None:
                return None
            ends.append(float(value))
        return min(ends), max(ends)

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` writes. It contains no real time, so the same input gives the same bytes."""
        config = self.outcome.config
        calibration = config.calibration
        return {
            "calibration": {
                "kind": calibration.kind,
                "model": calibration.model,
                "fingerprint": calibration.fingerprint,
                "device": calibration.device,
                "stoker": calibration.stoker,
            },
            "fleet": asdict(config.fleet),
            "policy": config.router.policy,
            "seed": config.seed,
            "faults": list(config.faults),
            "summary": asdict(self.summary),
            "fast": None if self.fast is None else asdict(self.fast),
            "slow": None if self.slow is None else asdict(self.slow),
            "warnings": self.warnings,
        }


def predict(
    config: SimConfig,
    workload: Workload,
    goal: LatencyGoal,
    gpu_hour_price: float | None = None,
    *,
    ranges: bool = True,
) -> Prediction:
    """Simulate a workload, and twice more at the ends of the calibration's range."""
    outcome = Simulation(config).run(workload)
    summary = summarize(outcome, goal, gpu_hour_price)
    share = config.calibration.residuals.range_share
    fast = slow = None
    if ranges and share:
        fast, slow = (
            summarize(Simulation(replace(config, speed=speed)).run(workload), goal, gpu_hour_price)
            for speed in (1 - share, 1 + share)
        )
    return Prediction(summary, outcome, fast, slow, _warnings(outcome, summary))


def _warnings(outcome: SimOutcome, summary: SimSummary) -> list[str]:
    calibration = outcome.config.calibration
    found = []
    if calibration.kind == "estimate":
        found.append(f"The times of {calibration.device} are closed-form estimates and not measurements.")
    if summary.outside_share > 0:
        bounds = calibration.bounds
        found.append(
            f"{summary.outside_share:.1%} of the steps are beyond the calibrated bounds ({bounds.rows} rows, "
            f"{bounds.step_tokens} tokens in a step, {bounds.context_tokens} tokens of context). Their times are extrapolated."
        )
    refused = summary.requests - summary.outcomes.get("ok", 0)
    if refused:
        found.append(f"{refused} of {summary.requests} requests were not answered; times are those of the others.")
    return found

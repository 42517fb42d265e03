"""fleet_search: the cheapest fleet that keeps a latency goal under a load, found by simulating candidates.

A candidate is a layout (one calibration), a number of workers, how many of them only prefill, and the RAM for KV of each. More
workers never make a fleet worse, so the number is found by bisection. For each number, the best split is searched as if the share
of good answers had one maximum over the number of prefill workers; `exhaustive` tries every split instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import and_

from stoker.base.errors import ConfigError
from stoker.sim.calibration import Calibration
from stoker.sim.simulation import SimConfig, SimFleet, SimOutcome, Simulation
from stoker.sim.summary import LatencyGoal, SimSummary, keeps_itl, keeps_ttft, summarize
from stoker.sim.workloads.workload import Workload

_BUSY = 0.85  # a worker that computes for a larger share of the time is a bottleneck


@dataclass(frozen=True, slots=True)
class SearchGoal:
    """The goal that at least `share` of the requests keep the latency goal."""

    latency: LatencyGoal
    share: float = 0.95

    def __post_init__(self) -> None:
        if self.latency.ttft_s is None and self.latency.itl_s is None:
            raise ConfigError("give a latency goal: --goal-ttft-ms, --goal-itl-ms or both")
        if not 0 < self.share <= 1:
            raise ConfigError(f"--goal-share {self.share:g}: must be above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class FleetOption:
    """What may be chosen: a layout, and the RAM for KV of each worker."""

    calibration: Calibration
    host_gib: float = 0.0
    gpu_hour_price: float = 1.0

    @property
    def name(self) -> str:
        memory = f" with {self.host_gib:g} GiB of RAM for KV" if self.host_gib else ""
        return f"{self.calibration.model} on {self.calibration.shape.gpus} x {self.calibration.device}{memory}"


@dataclass(frozen=True, slots=True)
class SearchedFleet:
    """A simulated candidate."""

    option: FleetOption
    fleet: SimFleet
    summary: SimSummary
    good_share: float  # of all requests, those that were not answered included
    ttft_share: float  # answered requests that keep the goal for the first token
    itl_share: float

    @property
    def gpus(self) -> int:
        return self.fleet.num_workers * self.option.calibration.shape.gpus

    @property
    def price_per_hour(self) -> float:
        return self.gpus * self.option.gpu_hour_price

    def words(self) -> str:
        fleet = self.fleet
        counts = ((fleet.unified, "unified"), (fleet.prefill, "prefill"), (fleet.decode, "decode"))
        return " + ".join(f"{count} {role}" for count, role in counts if count)


@dataclass(slots=True)
class SearchResult:
    """All simulated candidates, the one that is picked, and what keeps a smaller fleet from the goal."""

    tried: list[SearchedFleet] = field(default_factory=list)
    picked: SearchedFleet | None = None
    binding: str = ""

    def frontier(self) -> list[SearchedFleet]:
        """Return the best candidate of each price, from the cheapest to the first that keeps the goal."""
        best: dict[float, SearchedFleet] = {}
        for one in self.tried:
            known = best.get(one.price_per_hour)
            if known is None or one.good_share > known.good_share:
                best[one.price_per_hour] = one
        return [best[price] for price in sorted(best)]


class FleetSearch:
    """Simulates candidates. `progress` is told of each one."""

    def __init__(
        self,
        workload: Workload,
        goal: SearchGoal,
        max_gpus: int,
        progress: Callable[[SearchedFleet], object],
        seed: int = 0,
        exhaustive: bool = False,
    ) -> None:
        if max_gpus < 1:
            raise ConfigError(f"--max-gpus {max_gpus}: must be at least 1")
        self._workload = workload
        self._goal = goal
        self._max_gpus = max_gpus
        self._progress = progress
        self._seed = seed
        self._exhaustive = exhaustive
        self._known: dict[tuple[int, SimFleet], SearchedFleet] = {}
        self.result = SearchResult()

    def run(self, options: Sequence[FleetOption]) -> SearchResult:
        """Search over all options. The cheapest fleet that keeps the goal is picked."""
        result, smaller = self.result, None
        for number, option in enumerate(options):
            found, before = self._smallest(number, option)
            if found is not None and (result.picked is None or _rank(found) < _rank(result.picked)):
                result.picked, smaller = found, before
            elif result.picked is None and before is not None:
                smaller = before if smaller is None or before.good_share > smaller.good_share else smaller
        if smaller is not None:
            result.binding = binding_constraint(smaller, self._goal)
        return result

    def evaluate(self, number: int, option: FleetOption, fleet: SimFleet) -> SearchedFleet:
        """Simulate a fleet, unless it was simulated before."""
        known = self._known.get((number, fleet))
        if known is not None:
            return known
        config = SimConfig(option.calibration, fleet, seed=self._seed)
        outcome = Simulation(config).run(self._workload)
        summary = summarize(outcome, self._goal.latency, None)
        good, ttft, itl = _shares(outcome, self._goal.latency)
        found = SearchedFleet(option, fleet, summary, good, ttft, itl)
        self._known[number, fleet] = found
        self.result.tried.append(found)
        self._progress(found)
        return found

    def _smallest(self, number: int, option: FleetOption) -> tuple[SearchedFleet | None, SearchedFleet | None]:
        """Return the smallest fleet that keeps the goal, or None, and the best fleet that is one worker smaller."""
        most = self._max_gpus // option.calibration.shape.gpus
        if most < 1:
            return None, None
        high = 1
        while high < most and not self._keeps(self._best(number, option, high)):
            high = min(2 * high, most)
        best = self._best(number, option, high)
        if not self._keeps(best):
            return None, best
        low = high // 2  # does not keep the goal, or is 0
        while high - low > 1:
            middle = (low + high) // 2
            if self._keeps(self._best(number, option, middle)):
                high = middle
            else:
                low = middle
        smaller = self._best(number, option, high - 1) if high > 1 else None
        return self._best(number, option, high), smaller

    def _keeps(self, one: SearchedFleet) -> bool:
        return one.good_share >= self._goal.share

    def _best(self, number: int, option: FleetOption, num_workers: int) -> SearchedFleet:
        """Return the best way to divide `num_workers` workers."""

        def split(num_prefill: int) -> SearchedFleet:
            base = SimFleet(unified=num_workers, host_gib=option.host_gib)
            if num_prefill:
                base = replace(base, unified=0, prefill=num_prefill, decode=num_workers - num_prefill)
            return self.evaluate(number, option, base)

        unified = split(0)
        if num_workers == 1:
            return unified
        low, high = 1, num_workers - 1
        if self._exhaustive:
            return max((unified, *map(split, range(low, high + 1))), key=_quality)
        while high - low > 2:
            first, second = low + (high - low) // 3, high - (high - low) // 3
            if _quality(split(first)) >= _quality(split(second)):
                high = second - 1
            else:
                low = first + 1
        return max((unified, *map(split, range(low, high + 1))), key=_quality)


def binding_constraint(one: SearchedFleet, goal: SearchGoal) -> str:
    """Say why a fleet misses the goal, and what would help."""
    summary, latency = one.summary, goal.latency
    busy: dict[str, list[float]] = {role: [] for role in ("unified", "prefill", "decode")}
    for name, share in summary.utilisation.items():
        busy[name.rpartition("-")[0]].append(share)
    means = {role: sum(shares) / len(shares) for role, shares in busy.items() if shares}
    role, most = max(means.items(), key=lambda item: item[1])
    unanswered = 1 - summary.outcomes.get("ok", 0) / max(1, summary.requests)
    too_long = summary.outcomes.get("too_long", 0) / max(1, summary.requests)
    start = f"{one.words()} keep the goal for {one.good_share:.1%} of the requests"
    if 2 * too_long > unanswered:
        shape = one.option.calibration.shape
        longest = min(shape.max_model_tokens, shape.kv_blocks * shape.block_tokens)
        return (
            f"{start}; {too_long:.1%} are longer than the {longest} tokens that a worker takes. The constraint: their length: "
            "calibrate with a larger --max-model-tokens or more KV memory, or take these requests out of the trace."
        )
    if unanswered > 0.01:
        why = f"{unanswered:.1%} are not answered at all: the queue is full"
    elif latency.ttft_s is not None and one.ttft_share <= one.itl_share:
        why = f"the first token is too late for {1 - one.ttft_share:.1%}"
    else:
        why = f"tokens come too slowly for {1 - one.itl_share:.1%}"
    if summary.preemptions > summary.requests // 100:
        advice = f"KV memory is too small ({summary.preemptions} preemptions): use more of it or more workers"
    elif most > _BUSY:
        advice = f"{role} workers compute for {most:.0%} of the time: add {role} workers"
    else:
        advice = (
            f"no kind of worker is busy all the time ({role} workers {most:.0%}), so bursts or single long requests decide: "
            "relax the goal, or use faster GPUs or more of them for each worker"
        )
    return f"{start}; {why}. The constraint: {advice}."


def _shares(outcome: SimOutcome, goal: LatencyGoal) -> tuple[float, float, float]:
    """Return the shares of good requests among all, and among the answered ones by each part of the goal."""
    answered = list(outcome.records.answered())
    in_time = [keeps_ttft(goal, outcome, i) for i in answered]
    smooth = [keeps_itl(goal, outcome, i) for i in answered]
    num_good = sum(map(and_, in_time, smooth))
    num_answered = max(1, len(answered))
    return num_good / len(outcome.records), sum(in_time) / num_answered, sum(smooth) / num_answered


def _quality(one: SearchedFleet) -> tuple[float, float]:
    """Among fleets of a size: more good answers, then a shorter typical wait."""
    return one.good_share, -(one.summary.ttft_ms.p90 or float("inf"))


def _rank(one: SearchedFleet) -> tuple[float, float]:
    return one.price_per_hour, -one.good_share

"""HTTP runs on an H200, predicted from engine runs on an H200: the simulator beside the recorded results.

The calibration is made from the results of `offline`: decode steps of 1, 8, 64 and 256 rows, prompts of 4,096 tokens and one of
8,192. They tell what tokens and attention cost. What a token of context costs was not recorded; it is the estimate of `stoker
calibrate --gpu 1xH200`. Host costs are the defaults, without a gateway. Nothing is taken from the HTTP runs.

The loads are those of `http_serving`, whose prompts and answers have random lengths within 80% of the mean (the simulator draws
its own), and the sessions of `agent_sessions`, which are the same. Each load was run once, so that the spread of real runs is not
known. Everything runs on a virtual clock.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from bench import results
from bench.contract import BenchmarkError, Needs, Report, Result

if TYPE_CHECKING:
    from stoker.sim.calibration import Calibration
    from stoker.sim.simulation import SimOutcome
    from stoker.sim.workloads.workload import Workload

NAME = "sim_recorded"
HELP = "recorded HTTP runs on an H200 beside stoker sim, calibrated with recorded engine runs"
NEEDS = Needs(packages=("msgspec",))
MODELS = {"llama8b": "Llama-3.1-8B", "qwen30a3b": "Qwen3-30B-A3B"}
BATCHES = (1, 8, 64, 256)
DECODE_CONTEXT = 272  # the mean of 128 prompt tokens and 16 to 272 output tokens
STEP_TOKENS, PROMPT_TOKENS = 8192, 4096  # a step of the recorded prefill has two prompts
STREAMS = (1, 64, 200, 512)
AGENTS, AGENT_MODEL = ("full", "overload"), "llama8b"
MEDIAN_ALLOWED, TAIL_ALLOWED, HIT_ALLOWED = 8.0, 15.0, 1.0  # percent, percent and points
_LEAST_ERROR = 0.01  # a smaller error counts as this one: the ratio to what is allowed must exist


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS), help="default: all")
    parser.add_argument("--streams", type=int, nargs="*", choices=STREAMS, default=list(STREAMS), help="default: all")
    parser.add_argument("--agents", nargs="*", choices=AGENTS, default=list(AGENTS), help="loads (default: all)")


def run(args: argparse.Namespace) -> Report:
    report = Report(details=[])
    for shape in args.models:
        calibration = recorded_worker(shape)
        for streams in args.streams:
            _compare_streams(shape, calibration, streams, report)
        for name in args.agents if shape == AGENT_MODEL else ():
            _compare_agents(shape, calibration, name, report)
    return report


def recorded(benchmark: str, case: str, metric: str) -> float:
    """Return the recorded value of Stoker."""
    for record in results.read(results.path_of(benchmark)):
        if (record.case, record.metric) == (case, metric):
            return record.value
    raise BenchmarkError(f"bench/results/{benchmark}.json has no {metric!r} of {case!r}")


def recorded_worker(shape: str) -> Calibration:
    """Return the estimate of a worker with the step times that its engine was measured with."""
    from msgspec import structs

    from bench.support.estimated_worker import estimated_worker
    from stoker.sim.calibration import HostCosts, StepModel

    estimate, model = estimated_worker(shape, "1xH200"), MODELS[shape]
    context_s = estimate.step.context_s
    prefill_s = STEP_TOKENS / recorded("offline", model, "prefill, 16 prompts of 4,096 tokens")
    longest_s = recorded("offline", model, "first token of an 8,192-token prompt") / 1e3
    short_pairs, long_pairs = STEP_TOKENS * (PROMPT_TOKENS + 1) / 2, STEP_TOKENS * (STEP_TOKENS + 1) / 2
    attention_s = max(0.0, (longest_s - prefill_s) / (long_pairs - short_pairs))
    knot_s = [
        recorded("offline", model, f"decode step, batch {rows}") / 1e3 - context_s * rows * DECODE_CONTEXT
        for rows in BATCHES
    ]
    knot_s.append(prefill_s - attention_s * short_pairs)
    step = StepModel([*BATCHES, STEP_TOKENS], knot_s, context_s=context_s, attention_s=attention_s)
    return structs.replace(estimate, step=step, host=HostCosts(dispatch_s=0.0))


def _simulated(calibration: Calibration, load: Workload, concurrency: int | None) -> SimOutcome:
    """Simulate one worker without a gateway: everything is admitted at once."""
    from stoker.gateway.admission.admission_settings import AdmissionSettings
    from stoker.sim.simulation import SimConfig, SimFleet, Simulation

    everything = AdmissionSettings(requests_per_worker=1 << 20, waiting_per_worker=1 << 20, prefill_tokens=1 << 30)
    config = SimConfig(calibration, SimFleet(unified=1), admission=everything, concurrency=concurrency)
    return Simulation(config).run(load)


def _compare_streams(shape: str, calibration: Calibration, streams: int, report: Report) -> None:
    """Predict streams that each send the next request when the last one is answered."""
    from bench.engine.http_serving import LOADS
    from stoker.sim.summary import LatencyGoal, summarize
    from stoker.sim.workloads.synthetic import Synthetic

    load = LOADS[streams]
    requests = Synthetic(
        requests=load.num_requests, input_tokens=load.tokens_in, output_tokens=load.tokens_out, spread=0.8, seed=1
    )
    found = summarize(_simulated(calibration, requests, streams), LatencyGoal(), None)
    case = f"{MODELS[shape]}, {load.describe()}"
    for metric, predicted, allowed in (
        ("throughput", found.requests_per_s, MEDIAN_ALLOWED),
        ("TTFT p50", found.ttft_ms.p50, MEDIAN_ALLOWED),
        ("time between tokens p50", found.itl_ms.p50, MEDIAN_ALLOWED),
        ("TTFT p99", found.ttft_ms.p99, TAIL_ALLOWED),
        ("time between tokens p99", found.itl_ms.p99, TAIL_ALLOWED),
    ):
        _add("http_serving", case, metric, predicted or 0.0, allowed, report)


def _compare_agents(shape: str, calibration: Calibration, name: str, report: Report) -> None:
    """Predict agents with growing conversations and think times."""
    from bench.support.agent_load import LOADS, AgentProfile
    from bench.support.agent_turns import AgentTurns
    from stoker.sim.summary import LatencyGoal, quantile, summarize

    load = AgentTurns(LOADS[name], AgentProfile())
    outcome = _simulated(calibration, load, None)
    found, records = summarize(outcome, LatencyGoal(), None), outcome.records
    starts = {session.start_s for session in load.sessions()}
    ttft_ms: dict[bool, list[float]] = {True: [], False: []}
    for start_s, ttft_s in zip(records.started_s, records.ttft_s, strict=True):
        ttft_ms[start_s in starts].append(1e3 * ttft_s)
    first, later = sorted(ttft_ms[True]), sorted(ttft_ms[False])
    case = f"{MODELS[shape]}, {LOADS[name].describe()}"
    for metric, predicted, allowed in (
        ("wall time", found.duration_s, MEDIAN_ALLOWED),
        ("TTFT of first turns p50", quantile(first, 0.5), MEDIAN_ALLOWED),
        ("TTFT of first turns p90", quantile(first, 0.9), TAIL_ALLOWED),
        ("TTFT of later turns p50", quantile(later, 0.5), MEDIAN_ALLOWED),
        ("TTFT of later turns p90", quantile(later, 0.9), TAIL_ALLOWED),
        ("time between tokens p50", found.itl_ms.p50, MEDIAN_ALLOWED),
        ("time between tokens p90", found.itl_ms.p90, TAIL_ALLOWED),
        ("cached share of prompt tokens", 100 * found.hit_ratio, HIT_ALLOWED),
    ):
        _add("agent_sessions", case, metric, predicted or 0.0, allowed, report)


def _add(benchmark: str, case: str, metric: str, predicted: float, allowed: float, report: Report) -> None:
    """Put a prediction beside the recorded value, and its error beside the allowed one."""
    real = recorded(benchmark, case, metric)
    is_share = allowed == HIT_ALLOWED
    error, unit = (predicted - real, "points") if is_share else (100 * (predicted / real - 1), "%")
    report.details.append({"case": case, "metric": metric, "recorded": real, "predicted": predicted})
    report.results.append(
        Result(
            case,
            f"error of {metric}",
            unit,
            max(_LEAST_ERROR, round(abs(error), 2)),
            competitor="allowed",
            competitor_value=allowed,
            comparison="baseline",
            notes=f"recorded {real:.4g}, predicted {predicted:.4g}, {error:+.1f} {unit}",
            target=1.0,
        )
    )

"""The size of mixed steps, simulated: the real scheduler on a cost model of a device, with a virtual clock.

The batch is all requests at once, 1,024 tokens in and 256 out (a CPU: 128 and 32). The sessions are agents: a shared
head, a growing prompt, tool results of 50 to 6,000 tokens, think time. Each policy is a limit for the tokens of a step in
which any sequence decodes:

    goal      the controller (stoker/sched/step_size.py) with the default goal for the time between tokens
    fixed     a fixed number of tokens: what an H200 computes in about 50 ms; no limit on a CPU
    largest   the limit of prefill-only steps, as in vLLM

All policies share the order of the scheduler. The model compares policies. It does not predict a benchmark's result.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.contract import Better, Needs, Report, Result

if TYPE_CHECKING:
    from bench.support.simulated_device import SimulatedRequest, Simulation

NAME = "step_size"
HELP = "throughput, TTFT and time between tokens by the policy for mixed steps, simulated"
NEEDS = Needs()
SEED = 0
HEAD_TOKENS, TURNS, OUT_TOKENS, THINK_S = 3000, 5, 150, 2.0


@dataclass(frozen=True)
class Setup:
    """A device and the limits of its engine."""

    device: str
    fixed_tokens: int
    step_tokens: int
    target_itl_s: float
    block_tokens: int
    num_blocks: int
    max_rows: int
    steps_ahead: int
    batch: tuple[int, int, int]  # requests, tokens in, tokens out
    sessions: tuple[int, ...]  # loads: numbers of agents' sessions


SETUPS = {
    "dense": Setup("8B dense, H200", 2048, 8192, 0.075, 64, 14_000, 512, 1, (512, 1024, 256), (24, 96, 144)),
    "moe": Setup("30B-A3B MoE, H200", 4096, 8192, 0.075, 64, 13_000, 512, 1, (512, 1024, 256), (24, 96, 144)),
    "cpu": Setup("135M, two CPU cores", 512, 512, 0.25, 16, 4_000, 64, 0, (32, 128, 32), ()),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=tuple(SETUPS), nargs="+", default=list(SETUPS), help="default: all")
    parser.add_argument("--target-itl-ms", type=float, nargs="+", help="other goals for the time between tokens")
    parser.add_argument("--sessions", type=int, nargs="*", help="other numbers of sessions")


def run(args: argparse.Namespace) -> Report:
    report = Report(details={})
    for name in args.device:
        setup = SETUPS[name]
        goals = [ms / 1e3 for ms in args.target_itl_ms or ()] or [setup.target_itl_s]
        policies: dict[str, tuple[str, float]] = {"largest": ("largest", 0.0), "fixed": ("fixed", 0.0)}
        policies |= {f"goal {goal_s * 1e3:g} ms": ("goal", goal_s) for goal_s in goals}
        loads = [0, *(setup.sessions if args.sessions is None else args.sessions)]
        for load in loads:
            found = {policy: _measure(setup, load, *how) for policy, how in policies.items()}
            _report(report, setup, load, found)
    return report


def simulation(setup: Setup, policy: str, target_itl_s: float) -> Simulation:
    from bench.support.simulated_device import DEVICES, FixedSize, Simulation
    from stoker.sched.scheduler_config import SchedulerConfig

    config = SchedulerConfig(
        setup.block_tokens, setup.step_tokens, setup.max_rows, target_itl_s=target_itl_s or float("inf")
    )
    made = Simulation(config, DEVICES[setup.device], setup.num_blocks, setup.steps_ahead, SEED)
    if policy == "fixed":
        made.scheduler.step_size = FixedSize(setup.fixed_tokens)
    return made


def run_batch(made: Simulation, setup: Setup) -> list[SimulatedRequest]:
    count, num_in, num_out = setup.batch
    rng = random.Random(SEED)
    for number in range(count):
        made.add(_request(f"r{number}", [rng.randrange(1000, 9000) for _ in range(num_in)], num_out), 0.0)
    made.run()
    return made.finished


def run_sessions(made: Simulation, num_sessions: int) -> list[SimulatedRequest]:
    """Run agents' sessions. Return the requests of later turns."""
    head = _text(random.Random(SEED), HEAD_TOKENS, HEAD_TOKENS)

    def add_turn(session: str, turn: int, before: list[int], pause_s: float) -> None:
        rng = random.Random(f"{SEED} {session} {turn}")  # the same turn under every policy
        token_ids = before + _text(rng, 50, 6000)
        arrival_s = made.now_s + rng.expovariate(1 / pause_s)
        made.add(_request(f"{session}/{turn}", token_ids, rng.randint(20, 2 * OUT_TOKENS)), arrival_s)

    def next_turn(done: SimulatedRequest) -> None:
        session, _, turn = done.request.request_id.partition("/")
        if int(turn) + 1 < TURNS:
            add_turn(session, int(turn) + 1, [*done.request.token_ids, *done.token_ids], THINK_S)

    for number in range(num_sessions):
        add_turn(str(number), 0, head, 2 * THINK_S)
    made.run(next_turn)
    return [request for request in made.finished if not request.request.request_id.endswith("/0")]


def _text(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(1000, 9000) for _ in range(int(low * (high / low) ** rng.random()))]


def _request(name: str, token_ids: list[int], num_out: int):  # type: ignore[no-untyped-def]
    from stoker.base.ids import RequestId
    from stoker.sched.request import GenerateRequest, SamplingParams

    return GenerateRequest(RequestId(name), token_ids, len(token_ids), SamplingParams(temperature=0.0), num_out)


def _measure(setup: Setup, num_sessions: int, policy: str, target_itl_s: float) -> dict[str, float]:
    made = simulation(setup, policy, target_itl_s)
    began_s = time.perf_counter()
    done = run_sessions(made, num_sessions) if num_sessions else run_batch(made, setup)
    gaps = [gap for request in made.finished for gap in request.gaps_s]
    ttfts = [request.ttft_s for request in done]
    out_tokens = sum(len(request.token_ids) for request in made.finished)
    return {
        "out_toks": out_tokens / made.now_s,
        "wall_s": made.now_s,
        "ttft_p50_ms": _percentile(ttfts, 50) * 1e3,
        "ttft_p90_ms": _percentile(ttfts, 90) * 1e3,
        "itl_p50_ms": _percentile(gaps, 50) * 1e3,
        "itl_p90_ms": _percentile(gaps, 90) * 1e3,
        "itl_p99_ms": _percentile(gaps, 99) * 1e3,
        "host_s": time.perf_counter() - began_s,
    }


def _percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def _report(report: Report, setup: Setup, num_sessions: int, found: dict[str, dict[str, float]]) -> None:
    count, num_in, num_out = setup.batch
    load = f"{num_sessions} sessions" if num_sessions else f"{count} requests at once, {num_in} in, {num_out} out"
    case = f"simulated {setup.device}, {load}"
    for policy, values in found.items():
        report.details[f"{case}, {policy}"] = values
        print(f"{case}, {policy}: " + " ".join(f"{key}={value:.4g}" for key, value in values.items()), flush=True)
    baseline = found["largest"]
    for policy, values in found.items():
        if policy.startswith("goal"):
            for metric, key, unit in (
                ("throughput", "out_toks", "output tokens/s"),
                ("TTFT p90", "ttft_p90_ms", "ms"),
                ("time between tokens p99", "itl_p99_ms", "ms"),
            ):
                better: Better = "higher" if key == "out_toks" else "lower"
                line = Result(case, metric, unit, values[key], better, "largest steps", baseline[key], "baseline")
                report.results.append(line)

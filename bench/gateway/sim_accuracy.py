"""The simulator's prediction beside real runs of the same load: SmolLM2 on a CPU, two workers and a gateway.

Each layout is started, calibrated over HTTP, and then loaded --repeats times with new prompts in each case. `stoker sim` gets
the same load. The cases are agents in a closed loop, a saturated load, prompts longer than any calibrated one, and a KV pool
of 0.35 times the working set. The spread is that of the real runs: largest minus smallest, relative to the median. On a
machine with other work it says how far a prediction can be trusted at all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.contract import BenchmarkError, Needs, Report, Result
from bench.support.processes import environment, free_ports, python_module, started, wait_for_http

NAME = "sim_accuracy"
HELP = "predictions of stoker sim beside real runs on a CPU: TTFT, time between tokens, hit ratio"
NEEDS = Needs(packages=("torch", "aiohttp", "msgspec"))
LAYOUTS = {"2 unified": ("unified", "unified"), "1 prefill, 1 decode": ("prefill", "decode")}
BLOCK = 16
VOCAB = 40_000
ENGINE_FLAGS = ("--threads", "1", "--drafter", "off", "--max-model-tokens", "4096")
METRICS = ("ttft_p50_ms", "ttft_p90_ms", "itl_p50_ms", "itl_p90_ms", "e2e_p50_ms", "hit_ratio")


@dataclass(frozen=True)
class AgentLoad:
    """Sessions whose turns add `step` tokens each to a shared system prompt."""

    title: str
    sessions: int
    turns: int
    system: int
    step: int
    out: int
    think_s: float
    concurrency: int
    pool_share: float | None = None  # of the working set; None: everything fits

    @property
    def working_set_tokens(self) -> int:
        return self.system + self.sessions * (self.turns * self.step + self.out)


CASES = (
    AgentLoad("agents", sessions=8, turns=3, system=192, step=96, out=24, think_s=0.5, concurrency=4),
    AgentLoad("saturated", sessions=16, turns=1, system=96, step=128, out=24, think_s=0.0, concurrency=16),
    AgentLoad(
        "long prompts, not calibrated", sessions=6, turns=1, system=0, step=1100, out=16, think_s=0.0, concurrency=2
    ),
    AgentLoad(
        "pool of 0.35x", sessions=8, turns=3, system=192, step=128, out=24, think_s=0.2, concurrency=4, pool_share=0.35
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=3, help="real runs of each case (default: %(default)s)")
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS), help="default: all")
    parser.add_argument("--cases", nargs="+", default=[case.title for case in CASES], help="default: all")


def run(args: argparse.Namespace) -> Report:
    report = Report(details=[])
    cases = [case for case in CASES if case.title in args.cases]
    with tempfile.TemporaryDirectory() as scratch:
        for layout in args.layouts:
            for group in ([c for c in cases if c.pool_share is None], [c for c in cases if c.pool_share is not None]):
                if group:
                    _run_group(layout, group, args.repeats, Path(scratch), report)
    return report


def _run_group(layout: str, cases: list[AgentLoad], repeats: int, scratch: Path, report: Report) -> None:
    share = cases[0].pool_share
    num_workers = len(LAYOUTS[layout])
    blocks = 2048
    if share is not None:
        blocks = max(64, int(share * cases[0].working_set_tokens / num_workers / BLOCK))
    with _fleet(layout, blocks, scratch) as (workers, gateway):
        calibration = _calibrate(workers, gateway, blocks, scratch)
        for case in cases:
            real = []
            for number in range(repeats):
                trace = _write_trace(case, number, scratch)
                before = os.getloadavg()[0]
                real.append({**asyncio.run(_load(case, trace, gateway)), "load_average": before})
                print(layout, case.title, number, json.dumps(real[-1]), flush=True)
            predicted = _predict(case, layout, calibration, _write_trace(case, 0, scratch))
            print(layout, case.title, "predicted", json.dumps(predicted), flush=True)
            report.details.append({"layout": layout, "case": case.title, "real": real, "predicted": predicted})
            report.results += _results(f"{layout}: {case.title}", real, predicted)


@contextmanager
def _fleet(layout: str, blocks: int, scratch: Path) -> Iterator[tuple[list[str], str]]:
    roles = LAYOUTS[layout]
    ports = free_ports(len(roles) + 1)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with ExitStack() as stack:
        for number, role in enumerate(roles):
            flags = ("--port", ports[number], "--role", role, "--kv-blocks", blocks, *ENGINE_FLAGS)
            process = stack.enter_context(
                started(python_module("stoker.cli.main", "serve", *flags), scratch / f"worker{number}.log")
            )
            wait_for_http(f"{urls[number]}/ready", process, f"worker {number}", 120)
        options = [f"{url},role={role}" for url, role in zip(urls, roles, strict=False)]
        flags = ("--port", ports[-1], "--store", "none", *(part for one in options for part in ("--worker", one)))
        process = stack.enter_context(
            started(python_module("stoker.cli.main", "gateway", *flags), scratch / "gateway.log")
        )
        wait_for_http(f"{urls[-1]}/ready", process, "the gateway", 60)
        yield urls[:-1], urls[-1]


def _calibrate(workers: list[str], gateway: str, blocks: int, scratch: Path) -> Path:
    output = scratch / "calibration.json"
    urls = [part for url in workers for part in ("--url", url)]
    flags = ("--gateway", gateway, "--output", output, "--most-rows", 8, "--kv-blocks", blocks, *ENGINE_FLAGS)
    command = python_module("stoker.cli.main", "calibrate", *urls, *flags)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise BenchmarkError(f"calibrate: {done.stderr.strip().splitlines()[-1]}")
    print(done.stdout, flush=True)
    return output


def _write_trace(case: AgentLoad, number: int, scratch: Path) -> Path:
    """Write the sessions as a trace. Every repeat has other prompts; the split of the system prompt names it."""
    rng = random.Random(1)
    lines = []
    tools = BLOCK * (number + 1) if case.system else 0
    for session in range(case.sessions):
        known, requests = case.system, []
        for turn in range(case.turns):
            known += max(BLOCK, round(case.step * rng.uniform(0.6, 1.4)))
            pause_s = case.think_s * rng.uniform(0.5, 1.5) if turn else 0.0
            runs = [[1, known // BLOCK]]
            requests.append({"t": 0.0, "in": known, "out": case.out, "think_time": pause_s, "runs": runs})
        name = f"{case.title}-{number}-{session}"
        sizes = {"tool_tokens": tools, "system_tokens": case.system - tools}
        lines.append(json.dumps({"id": name, "block_size": BLOCK, **sizes, "requests": requests}))
    path = scratch / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


async def _load(case: AgentLoad, trace: Path, gateway: str) -> dict[str, float]:
    from stoker.base.clock import RealClock
    from stoker.loadgen.client import Client, Target
    from stoker.loadgen.load import LoadPlan
    from stoker.loadgen.player import play
    from stoker.loadgen.session import TokenRange
    from stoker.loadgen.summary import summarize
    from stoker.loadgen.traces import Replay, trace_sessions

    sessions = trace_sessions(trace, Replay(token_range=TokenRange.below(VOCAB)))
    records: list[Any] = []
    clock = RealClock()
    async with Client(Target(gateway, session_header=True), clock) as client:
        options = {"model": await client.first_model(), "temperature": 0.0, "ignore_eos": True, "max_tokens": case.out}
        plan = LoadPlan(slots=case.concurrency, keep_trace_times=False)
        await play(sessions, client, plan, options, lambda turn, record: records.append(record), clock)
    found = summarize(records)
    if found.failed or found.ttft_ms is None or found.itl_ms is None or found.e2e_ms is None:
        raise BenchmarkError(f"{case.title}: {found.failed} requests failed: {found.errors}")
    return {
        "ttft_p50_ms": found.ttft_ms.p50,
        "ttft_p90_ms": found.ttft_ms.p90,
        "itl_p50_ms": found.itl_ms.p50,
        "itl_p90_ms": found.itl_ms.p90,
        "e2e_p50_ms": found.e2e_ms.p50,
        "hit_ratio": found.hit_ratio or 0.0,
        "duration_s": found.duration_s,
    }


def _predict(case: AgentLoad, layout: str, calibration: Path, trace: Path) -> dict[str, float]:
    from stoker import __version__
    from stoker.sim.calibration import read_calibration
    from stoker.sim.simulation import SimConfig, SimFleet
    from stoker.sim.summary import LatencyGoal, predict
    from stoker.sim.workloads.agent_sessions import AgentSessions

    roles = LAYOUTS[layout]
    fleet = SimFleet(roles.count("unified"), roles.count("prefill"), roles.count("decode"))
    config = SimConfig(read_calibration(calibration, __version__), fleet, concurrency=case.concurrency)
    found = predict(config, AgentSessions(trace, start_spread_s=0.0), LatencyGoal(), ranges=False).summary
    return {
        "ttft_p50_ms": found.ttft_ms.p50 or 0.0,
        "ttft_p90_ms": found.ttft_ms.p90 or 0.0,
        "itl_p50_ms": found.itl_ms.p50 or 0.0,
        "itl_p90_ms": found.itl_ms.p90 or 0.0,
        "e2e_p50_ms": found.e2e_ms.p50 or 0.0,
        "hit_ratio": found.hit_ratio,
        "duration_s": found.duration_s,
    }


def _results(case: str, real: list[dict[str, float]], predicted: dict[str, float]) -> list[Result]:
    found = []
    for metric in METRICS:
        values = [one[metric] for one in real]
        middle = median(values)
        spread = (max(values) - min(values)) / middle if middle else 0.0
        if metric == "hit_ratio":
            error, unit = abs(predicted[metric] - middle) * 100, "points"
        else:
            error, unit = abs(predicted[metric] / middle - 1) * 100, "%"
        notes = f"real {middle:.4g}, predicted {predicted[metric]:.4g}, spread of {len(real)} real runs {spread:.0%}"
        found.append(Result(case, f"error of {metric}", unit, round(error, 2), notes=notes))
    return found

"""Small real fleets on this machine's CPU, and what `stoker sim` predicts for the same load.

The workers run SmolLM2 with one thread each, behind a real gateway. A load is a trace of agent sessions, which the load
generator plays and the simulator reads.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from bench.contract import BenchmarkError
from bench.support.processes import environment, free_ports, python_module, started, wait_for_http

if TYPE_CHECKING:
    from stoker.sim.calibration import Calibration

BLOCK = 16
POOL_BLOCKS = 2048
_VOCAB = 40_000
_MAX_MODEL_TOKENS = 4096
_ENGINE_FLAGS = ("--threads", "1", "--drafter", "off", "--max-model-tokens", _MAX_MODEL_TOKENS)
_SETTLE_S = 1.0  # until a new gateway has the workers' reports


@dataclass(frozen=True)
class AgentLoad:
    """Sessions in a closed loop. Their turns add about `step` tokens each to a shared system prompt."""

    title: str
    sessions: int
    turns: int
    system: int
    step: int
    out: int
    think_s: float
    concurrency: int

    @property
    def working_set_tokens(self) -> int:
        return self.system + self.sessions * (self.turns * self.step + self.out)


@dataclass(frozen=True)
class FleetShape:
    """Workers by role, and the settings in which they differ from the calibrated worker."""

    roles: tuple[str, ...]
    kv_blocks: int = POOL_BLOCKS  # of each worker
    max_rows: int | None = None
    step_tokens: int | None = None
    policy: str = "cost"

    def engine_flags(self) -> list[object]:
        flags: list[object] = ["--kv-blocks", self.kv_blocks, *_ENGINE_FLAGS]
        for name, value in (("--max-rows", self.max_rows), ("--step-tokens", self.step_tokens)):
            flags += [] if value is None else [name, value]
        return flags


@dataclass(frozen=True)
class RealFleet:
    """The addresses of running workers and of their gateway."""

    workers: list[str]
    gateway: str


@contextmanager
def real_workers(shape: FleetShape, scratch: Path) -> Iterator[list[str]]:
    """Start workers, and yield their addresses. They have answered a request."""
    urls = [f"http://127.0.0.1:{port}" for port in free_ports(len(shape.roles))]
    with ExitStack() as stack:
        workers = []
        for number, (url, role) in enumerate(zip(urls, shape.roles, strict=True)):
            flags = ("--port", url.rpartition(":")[2], "--role", role, *shape.engine_flags())
            log = scratch / f"worker{number}.log"
            workers.append(stack.enter_context(started(python_module("stoker.cli.main", "serve", *flags), log)))
        for number, process in enumerate(workers):
            wait_for_http(f"{urls[number]}/ready", process, f"worker {number}", 120)
        warm_up = AgentLoad("warm-up", 2 * len(workers), 1, 0, 200, 4, 0.0, 2 * len(workers))
        with real_gateway(shape, urls, scratch) as fleet:
            play_load(warm_up, write_trace(warm_up, 0, scratch), fleet)
        yield urls


@contextmanager
def real_gateway(shape: FleetShape, workers: list[str], scratch: Path) -> Iterator[RealFleet]:
    """Start a gateway before running workers.

    A gateway remembers the load of the last minutes. The simulated one has no past, so that each run needs a new gateway.
    """
    [port] = free_ports(1)
    flags: list[object] = ["--port", port, "--store", "none", "--policy", shape.policy]
    for url, role in zip(workers, shape.roles, strict=True):
        flags += ["--worker", f"{url},role={role}"]
    url = f"http://127.0.0.1:{port}"
    with started(python_module("stoker.cli.main", "gateway", *flags), scratch / "gateway.log") as process:
        wait_for_http(f"{url}/ready", process, "the gateway", 60)
        time.sleep(_SETTLE_S)
        yield RealFleet(workers, url)


def calibrate(fleet: RealFleet, shape: FleetShape, scratch: Path, most_rows: int) -> Path:
    """Measure the running workers together, and return the calibration file."""
    output = scratch / "calibration.json"
    urls = [part for url in fleet.workers for part in ("--url", url)]
    flags = ("--gateway", fleet.gateway, "--output", output, "--most-rows", most_rows, *shape.engine_flags())
    command = python_module("stoker.cli.main", "calibrate", *urls, *flags)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise BenchmarkError(f"calibrate: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    print(done.stdout, flush=True)
    return output


def write_trace(load: AgentLoad, number: int, scratch: Path) -> Path:
    """Write the sessions of a load. Runs of different `number` have other prompts of the same lengths."""
    rng = random.Random(1)
    lines = []
    tools = BLOCK * (number + 1) if load.system else 0  # sessions with equal tools share the system prompt
    for session in range(load.sessions):
        known, requests = load.system, []
        for turn in range(load.turns):
            known += max(BLOCK, round(load.step * rng.uniform(0.6, 1.4)))
            pause_s = load.think_s * rng.uniform(0.5, 1.5) if turn else 0.0
            runs = [[1, known // BLOCK]]
            requests.append({"t": 0.0, "in": known, "out": load.out, "think_time": pause_s, "runs": runs})
        name = f"{load.title}-{number}-{session}"
        sizes = {"tool_tokens": tools, "system_tokens": load.system - tools}
        lines.append(json.dumps({"id": name, "block_size": BLOCK, **sizes, "requests": requests}))
    path = scratch / f"{load.title}-{number}.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def play_load(load: AgentLoad, trace: Path, fleet: RealFleet) -> dict[str, float]:
    """Play a trace against a fleet, and return what its clients saw."""
    return asyncio.run(_play(load, trace, fleet.gateway))


async def _play(load: AgentLoad, trace: Path, gateway: str) -> dict[str, float]:
    from stoker.base.clock import RealClock
    from stoker.loadgen.client import Client, Target
    from stoker.loadgen.load import LoadPlan
    from stoker.loadgen.player import play
    from stoker.loadgen.session import TokenRange
    from stoker.loadgen.summary import summarize
    from stoker.loadgen.traces import Replay, trace_sessions

    sessions = trace_sessions(trace, Replay(token_range=TokenRange.below(_VOCAB)))
    records: list[Any] = []
    clock = RealClock()
    async with Client(Target(gateway, session_header=True), clock) as client:
        options = {"model": await client.first_model(), "temperature": 0.0, "ignore_eos": True}
        plan = LoadPlan(slots=load.concurrency, keep_trace_times=False)
        await play(sessions, client, plan, options, lambda turn, record: records.append(record), clock)
    found = summarize(records)
    if found.failed or found.ttft_ms is None or found.itl_ms is None or found.e2e_ms is None:
        raise BenchmarkError(f"{load.title}: {found.failed} requests failed: {found.errors}")
    return {
        "ttft_p50_ms": found.ttft_ms.p50,
        "ttft_p90_ms": found.ttft_ms.p90,
        "itl_p50_ms": found.itl_ms.p50,
        "itl_p90_ms": found.itl_ms.p90,
        "e2e_p50_ms": found.e2e_ms.p50,
        "e2e_mean_ms": found.e2e_ms.mean,
        "hit_ratio": found.hit_ratio or 0.0,
        "duration_s": found.duration_s,
    }


def predict_load(
    load: AgentLoad, shape: FleetShape, calibration: Calibration, traces: Sequence[Path]
) -> dict[str, float]:
    """Simulate the traces one by one with empty caches, and return the means of what their clients would see."""
    runs = [_predict(load, shape, calibration, trace) for trace in traces]
    return {name: fmean(one[name] for one in runs) for name in runs[0]}


def _predict(load: AgentLoad, shape: FleetShape, calibration: Calibration, trace: Path) -> dict[str, float]:
    from msgspec import structs

    from stoker.routing.settings import RouterSettings
    from stoker.sim.simulation import SimConfig, SimFleet
    from stoker.sim.summary import LatencyGoal, predict
    from stoker.sim.workloads.agent_sessions import AgentSessions

    counts = (shape.roles.count(role) for role in ("unified", "prefill", "decode"))
    changes = {"max_rows": shape.max_rows, "step_tokens": shape.step_tokens}
    changed: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
    worker = structs.replace(calibration, shape=structs.replace(calibration.shape, **changed))
    config = SimConfig(
        worker,
        SimFleet(*counts, kv_blocks=shape.kv_blocks),
        RouterSettings(policy=shape.policy),
        concurrency=load.concurrency,
    )
    found = predict(config, AgentSessions(trace, start_spread_s=0.0), LatencyGoal(), ranges=False).summary
    return {
        "ttft_p50_ms": found.ttft_ms.p50 or 0.0,
        "ttft_p90_ms": found.ttft_ms.p90 or 0.0,
        "itl_p50_ms": found.itl_ms.p50 or 0.0,
        "itl_p90_ms": found.itl_ms.p90 or 0.0,
        "e2e_p50_ms": found.e2e_ms.p50 or 0.0,
        "e2e_mean_ms": found.e2e_ms.mean or 0.0,
        "hit_ratio": found.hit_ratio,
        "duration_s": found.duration_s,
    }

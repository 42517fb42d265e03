"""What a router adds: its CPU time for a request and for a streamed chunk, and latency. Several routers in one run.

    python -m bench run router_overhead --router stoker --router smg --router vllm-router --router litellm

Two mock workers stand behind each router (bench/support/mock_worker.py). One router runs at a time, in alternating
order over the rounds. CPU time is user + system of the router's whole process tree over the run, divided by what the
client (bench/support/closed_loop_client.py) counted. Latency is measured one request after the other on one connection,
less the latency of the same requests sent directly to a mock worker. Client, workers and router share the machine: compare
CPU time per request and per chunk, not requests per second alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.contract import Better, Needs, Report, Result
from bench.support import routers
from bench.support.processes import cpu_s, free_ports, named_values, python_module, rss_mib, started, wait_for_port
from bench.support.router_client import closed_loop, latency_ms, wait_until_answering

NAME = "router_overhead"
HELP = "CPU time of routers per request and per streamed chunk, and the latency they add"
NEEDS = Needs(packages=("msgspec", "uvloop"), programs="the routers to compare with, on PATH")
BODY_KB = (2, 40, 400)
NUM_CHUNKS, PACED_MS = 64, 20


@dataclass(slots=True)
class RouterMeasurement:
    router: str
    round: int
    requests_per_s: float
    us_per_request: float
    chunks_per_s: float
    us_per_chunk: float
    paced_chunks_per_s: float
    us_per_paced_chunk: float
    rss_mib: float
    failed: int
    latency_ms: dict[str, tuple[float, float]] = field(default_factory=dict)  # body -> p50, p99 through the router
    direct_ms: dict[str, tuple[float, float]] = field(default_factory=dict)  # the same without the router


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--router", action="append", default=[], metavar="NAME[=COMMAND]", help="default: stoker; may be repeated"
    )
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="NAME=TEXT",
        help="a router's name in the results, with its version",
    )
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load (default: %(default)s)")
    parser.add_argument("--connections", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--paced-connections", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--samples", type=int, default=300, help="requests for the latency (default: %(default)s)")
    parser.add_argument("--model", default="mock", help="default: %(default)s")
    parser.add_argument("--ready-timeout-s", type=float, default=120.0, help="default: %(default)s")
    parser.add_argument("--log-dir", type=Path, default=Path("build/router_overhead"), help="default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    commands = routers.parse(args.router or ["stoker"])
    found: list[RouterMeasurement] = []
    for number in range(args.rounds):
        for name in commands if number % 2 == 0 else reversed(list(commands)):
            found.append(_measure(name, commands[name], number, args))
            print(json.dumps(asdict(found[-1])), flush=True)
    failed = [f"{one.failed} requests through {one.router} failed in round {one.round}" for one in found if one.failed]
    return Report(_results(found, named_values(args.label, "--label")), [asdict(one) for one in found], failed)


def _measure(name: str, command: str, number: int, args: argparse.Namespace) -> RouterMeasurement:
    log = args.log_dir / f"{name}.log"
    port, *mocks = free_ports(5)
    fast, paced = mocks[:2], mocks[2:]

    def mock(worker: int, delay_ms: int) -> list[str]:
        return python_module("bench.support.mock_worker", worker, "--chunks", NUM_CHUNKS, "--delay-ms", delay_ms)

    def router(workers: Sequence[int]) -> list[str]:
        urls = [f"http://127.0.0.1:{worker}" for worker in workers]
        return routers.fill(command, port, urls, args.log_dir, routers.ROUND_ROBIN)

    with (
        started(mock(fast[0], 0), log),
        started(mock(fast[1], 0), log),
        started(mock(paced[0], PACED_MS), log),
        started(mock(paced[1], PACED_MS), log),
    ):
        for worker in mocks:
            wait_for_port(worker)
        with started(router(fast), log) as process:
            wait_until_answering(port, args.model, args.ready_timeout_s)
            closed_loop(port, args.connections, 1.0, "full", args.model)
            full, full_s = _load_with_cpu(args, port, args.connections, "full", process)
            streamed, streamed_s = _load_with_cpu(args, port, args.connections, "stream", process)
            through = {f"{kb} KB": latency_ms(port, kb, args.samples, args.model) for kb in BODY_KB}
            direct = {f"{kb} KB": latency_ms(fast[0], kb, args.samples, args.model) for kb in BODY_KB}
            memory = rss_mib(process.pid)
        with started(router(paced), log) as process:
            wait_until_answering(port, args.model, args.ready_timeout_s)
            time.sleep(1.0)
            slow, slow_s = _load_with_cpu(args, port, args.paced_connections, "stream", process)
    return RouterMeasurement(
        router=name,
        round=number,
        requests_per_s=full["requests_per_s"],
        us_per_request=full_s / max(full["requests"], 1) * 1e6,
        chunks_per_s=streamed["chunks_per_s"],
        us_per_chunk=streamed_s / max(streamed["chunks"], 1) * 1e6,
        paced_chunks_per_s=slow["chunks_per_s"],
        us_per_paced_chunk=slow_s / max(slow["chunks"], 1) * 1e6,
        rss_mib=memory,
        failed=int(full["failed"] + streamed["failed"] + slow["failed"]),
        latency_ms=through,
        direct_ms=direct,
    )


def _load_with_cpu(
    args: argparse.Namespace, port: int, connections: int, mode: str, router: subprocess.Popen[bytes]
) -> tuple[dict[str, Any], float]:
    before_s = cpu_s(router.pid)
    counted = closed_loop(port, connections, args.seconds, mode, args.model)
    return counted, cpu_s(router.pid) - before_s


def _metrics(found: Sequence[RouterMeasurement]) -> dict[tuple[str, str, Better], float]:
    """(metric, unit, which is better) -> the median over the rounds."""

    def median(name: str) -> float:
        return float(statistics.median(getattr(one, name) for one in found))

    def added(body: str, at: int) -> float:
        return statistics.median(one.latency_ms[body][at] - one.direct_ms[body][at] for one in found)

    metrics: dict[tuple[str, str, Better], float] = {
        ("CPU per request", "us", "lower"): median("us_per_request"),
        ("CPU per chunk", "us", "lower"): median("us_per_chunk"),
        (f"CPU per chunk, one every {PACED_MS} ms", "us", "lower"): median("us_per_paced_chunk"),
    }
    for kb in BODY_KB:
        metrics[f"added latency p50, {kb} KB body", "ms", "lower"] = added(f"{kb} KB", 0)
        metrics[f"added latency p99, {kb} KB body", "ms", "lower"] = added(f"{kb} KB", 1)
    metrics["throughput", "requests/s", "higher"] = median("requests_per_s")
    metrics["streaming throughput", "chunks/s", "higher"] = median("chunks_per_s")
    metrics["memory", "MiB", "lower"] = median("rss_mib")
    return metrics


def _results(found: Sequence[RouterMeasurement], labels: dict[str, str]) -> list[Result]:
    by_router = {
        name: _metrics([one for one in found if one.router == name])
        for name in dict.fromkeys(one.router for one in found)
    }
    ours = by_router.get("stoker", {})
    others = [name for name in by_router if name != "stoker"] or [""]
    return [
        Result(
            "two mock workers",
            metric,
            unit,
            value,
            better,
            labels.get(other, other),
            by_router[other][metric, unit, better] if other else None,
        )
        for other in others
        for (metric, unit, better), value in ours.items()
    ]

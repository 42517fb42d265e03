"""`stoker sim`: predict what a fleet does under a load, on a virtual clock."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.base.errors import ConfigError
from stoker.base.output import print_result
from stoker.base.paths import expand_home

if TYPE_CHECKING:
    from stoker.sim.workloads.workload import Workload

NAME = "sim"
HELP = "predict latency, cache hits and cost of a fleet without running it"
DESCRIPTION = """Predict what a fleet does under a load. The real scheduler, block pool, router and admission run on a virtual
clock; the times of steps come from a calibration file (stoker calibrate). The same input gives the same output, byte for byte.
No GPU is needed. Examples: `stoker sim --calibration h200.json --unified 8 --trace conversation.jsonl`, or
`stoker sim --calibration h200.json --prefill 2 --decode 4 --rate 5 --turns 8 --think-s 10`."""
FORMATS = ("auto", "mooncake", "azure", "agents")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument(
        "--calibration", type=expand_home, metavar="FILE", help="Calibration file of the workers. It is required."
    )
    parser.add_argument("--model", help="Refuse a calibration of another model than this name or fingerprint.")
    _add_fleet(parser.add_argument_group("fleet"))
    _add_workload(parser.add_argument_group("load"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--goal-ttft-ms", type=float, metavar="MS", help="Goal for the time to the first token, for the goodput."
    )
    output.add_argument(
        "--goal-itl-ms", type=float, metavar="MS", help="Goal for an answer's mean time between tokens."
    )
    output.add_argument(
        "--gpu-hour-price", type=float, metavar="PRICE", help="Price of a GPU-hour, for the cost per million tokens."
    )
    output.add_argument("--no-range", action="store_true", help="Simulate once, without the range of the calibration.")
    output.add_argument("--json", action="store_true", help="Print JSON.")
    output.add_argument("--html", type=expand_home, metavar="FILE", help="Write a page with plots to this file.")


def _add_fleet(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--unified", type=int, metavar="N", help="Number of unified workers. Default: 1, if no others are given."
    )
    group.add_argument("--prefill", type=int, default=0, metavar="N", help="Number of prefill workers. Default: 0.")
    group.add_argument("--decode", type=int, default=0, metavar="N", help="Number of decode workers. Default: 0.")
    group.add_argument("--kv-blocks", type=int, metavar="N", help="KV blocks of each worker. Default: as calibrated.")
    group.add_argument(
        "--host-gib", type=float, default=0.0, metavar="GIB", help="RAM for KV of each worker. Default: 0."
    )
    group.add_argument(
        "--disk-gib", type=float, default=0.0, metavar="GIB", help="Disk for KV of each worker. Default: 0."
    )
    group.add_argument(
        "--shared-gib", type=float, default=0.0, metavar="GIB", help="A KV store for all workers. Default: 0."
    )
    group.add_argument("--policy", default="cost", help="Routing policy. Default: %(default)s.")
    group.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="FAULT",
        help="Let a worker fail: KIND:WORKER@START+SECONDS with the kinds loss and cut, or slow with a factor at the end, such as "
        "slow:unified-0@60+30x4. Repeatable.",
    )


def _add_workload(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trace", type=expand_home, metavar="FILE", help="Replay this trace. Default: a synthetic load."
    )
    group.add_argument("--format", choices=FORMATS, default="auto", help="Format of the trace. Default: %(default)s.")
    group.add_argument(
        "--num-requests", type=int, metavar="N", help="Number of requests. Default: 1000; for a trace all."
    )
    group.add_argument(
        "--speedup", type=float, default=1.0, metavar="X", help="Trace: replay X times faster. Default: 1."
    )
    group.add_argument(
        "--fixed-arrivals",
        action="store_true",
        help="Turns of a session arrive at fixed times, and not after the answer before.",
    )
    group.add_argument(
        "--max-pause-s", type=float, default=120.0, help="Agent sessions: cut longer pauses. Default: 120."
    )
    group.add_argument(
        "--start-spread-s",
        type=float,
        default=3600.0,
        help="Agent sessions: they start within this time. Default: 3600.",
    )
    group.add_argument(
        "--concurrency", type=int, metavar="N", help="Closed loop: sessions at a time, instead of arrival times."
    )
    group.add_argument("--no-session-keys", action="store_true", help="Clients send no session key.")
    group.add_argument("--rate", type=float, default=1.0, help="Synthetic: sessions per second. Default: 1.")
    group.add_argument(
        "--input-tokens", type=int, default=512, help="Synthetic: mean new tokens of a turn. Default: 512."
    )
    group.add_argument("--output-tokens", type=int, default=128, help="Synthetic: mean output length. Default: 128.")
    group.add_argument("--spread", type=float, default=0.0, help="Synthetic: lengths vary by this share. Default: 0.")
    group.add_argument("--turns", type=int, default=1, help="Synthetic: turns of a session. Default: 1.")
    group.add_argument(
        "--system-tokens", type=int, default=0, help="Synthetic: a system prompt that sessions share. Default: 0."
    )
    group.add_argument(
        "--systems", type=int, default=1, help="Synthetic: number of different system prompts. Default: 1."
    )
    group.add_argument(
        "--think-s", type=float, default=0.0, help="Synthetic: mean think time between turns. Default: 0."
    )
    group.add_argument("--seed", type=int, default=0, help="Seed of the load and of the simulation. Default: 0.")


def run(args: argparse.Namespace) -> int:
    from stoker import __version__
    from stoker.routing.policy import POLICIES
    from stoker.routing.settings import RouterSettings
    from stoker.sim.calibration import read_calibration
    from stoker.sim.report import as_html, as_json, table
    from stoker.sim.simulation import SimConfig, SimFleet
    from stoker.sim.summary import LatencyGoal, predict

    if args.calibration is None:
        raise ConfigError("give the workers' speed with --calibration FILE; `stoker calibrate` writes one")
    if args.gpu_hour_price is not None and args.gpu_hour_price < 0:
        raise ConfigError(f"--gpu-hour-price {args.gpu_hour_price:g}: must not be negative")
    if args.html is not None and not os.path.isdir(args.html.parent):
        raise ConfigError(f"--html {args.html}: there is no folder {args.html.parent}")
    calibration = read_calibration(args.calibration, __version__, args.model)
    POLICIES.get(args.policy, "--policy")
    unified = args.unified if args.unified is not None else int(not (args.prefill or args.decode))
    fleet = SimFleet(unified, args.prefill, args.decode, args.kv_blocks, args.host_gib, args.disk_gib, args.shared_gib)
    config = SimConfig(
        calibration,
        fleet,
        RouterSettings(policy=args.policy, seed=args.seed),
        faults=tuple(args.fault),
        concurrency=args.concurrency,
        session_keys=not args.no_session_keys,
        seed=args.seed,
    )
    goal = LatencyGoal(*(None if ms is None else ms / 1e3 for ms in (args.goal_ttft_ms, args.goal_itl_ms)))
    workload = _workload(args)
    prediction = predict(config, workload, goal, args.gpu_hour_price, ranges=not args.no_range)
    if args.html is not None:
        try:
            args.html.write_text(as_html(prediction, workload.describe()), encoding="utf-8")
        except OSError as wrong:
            raise ConfigError(f"--html {args.html}: cannot be written: {wrong.strerror}") from wrong
    print_result(as_json(prediction, workload.describe()) if args.json else table(prediction))
    return 0


def _workload(args: argparse.Namespace) -> Workload:
    from stoker.sim.workloads.synthetic import Synthetic

    if args.num_requests is not None and args.num_requests < 1:
        raise ConfigError(f"--num-requests {args.num_requests}: must be at least 1")
    for name in ("max_pause_s", "start_spread_s"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name):g}: must not be negative")
    if args.trace is None:
        return Synthetic(
            requests=1000 if args.num_requests is None else args.num_requests,
            rate=args.rate,
            input_tokens=args.input_tokens,
            output_tokens=args.output_tokens,
            spread=args.spread,
            turns=args.turns,
            system_tokens=args.system_tokens,
            systems=args.systems,
            think_s=args.think_s,
            fixed=args.fixed_arrivals,
            seed=args.seed,
        )
    return trace_workload(
        args.trace,
        args.num_requests,
        args.speedup,
        args.format,
        start_spread_s=args.start_spread_s,
        max_pause_s=args.max_pause_s,
        fixed=args.fixed_arrivals,
        seed=args.seed,
    )


def trace_workload(
    path: Path,
    num_requests: int | None,
    speedup: float,
    form: str = "auto",
    *,
    start_spread_s: float = 3600.0,
    max_pause_s: float = 120.0,
    fixed: bool = False,
    seed: int = 0,
) -> Workload:
    """Return the workload of a trace file. The last four arguments are for agent sessions."""
    from stoker.sim.workloads.agent_sessions import AgentSessions
    from stoker.sim.workloads.azure import AzureTrace
    from stoker.sim.workloads.mooncake import MooncakeTrace

    if num_requests is not None and num_requests < 1:
        raise ConfigError(f"--num-requests {num_requests}: must be at least 1")
    if not 0 < speedup < float("inf"):
        raise ConfigError(f"--speedup {speedup:g}: must be above 0")
    found = _format(path) if form == "auto" else form
    if found == "mooncake":
        return MooncakeTrace(path, num_requests, speedup)
    if found == "azure":
        return AzureTrace(path, num_requests, speedup)
    return AgentSessions(path, num_requests, speedup, start_spread_s, max_pause_s, fixed, seed)


def _format(path: Path) -> str:
    """Tell the format of a trace from its name and its first line."""
    from stoker.sim.workloads.trace_file import trace_rows

    if ".csv" in path.suffixes:
        return "azure"
    where, row = next(trace_rows(path), (None, {}))
    if where is None:
        raise ConfigError(f"--trace {path}: is empty")
    for field, found in (("hash_ids", "mooncake"), ("requests", "agents")):
        if field in row:
            return found
    raise ConfigError(f"{where}: has neither hash_ids (Mooncake) nor requests (agent sessions); give --format")

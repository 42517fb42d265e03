"""`stoker plan --trace`: the cheapest fleet that keeps a latency goal for a trace, by simulating candidates."""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.base.errors import ConfigError
from stoker.base.output import print_message, print_result
from stoker.base.paths import expand_home

if TYPE_CHECKING:
    from stoker.sim.fleet_search import FleetOption, FleetSearch, SearchedFleet, SearchGoal, SearchResult

_MISSED = 1  # exit code


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("fleet for a trace")
    group.add_argument(
        "--trace",
        type=expand_home,
        metavar="FILE",
        help="Find the cheapest fleet for this trace. Formats as `stoker sim`.",
    )
    group.add_argument(
        "--calibration",
        type=expand_home,
        action="append",
        default=[],
        metavar="FILE",
        help="A worker that the fleet may consist of, from `stoker calibrate`. Repeat it for other layouts or GPUs.",
    )
    group.add_argument(
        "--goal-ttft-ms", type=float, metavar="MS", help="Goal for the time to the first token of a request."
    )
    group.add_argument(
        "--goal-itl-ms", type=float, metavar="MS", help="Goal for the mean time between tokens of a request."
    )
    group.add_argument(
        "--goal-share", type=float, default=0.95, metavar="X", help="Share of requests that keep both. Default: 0.95."
    )
    group.add_argument(
        "--kv-ram-gib",
        type=float,
        action="append",
        default=[],
        metavar="GIB",
        help="RAM for KV of each worker. Repeat it to try several. Default: 0.",
    )
    group.add_argument(
        "--gpu-hour-price",
        type=float,
        action="append",
        default=[],
        metavar="PRICE",
        help="Price of a GPU-hour, one for each --calibration. Default: 1 for all.",
    )
    group.add_argument("--max-gpus", type=int, default=64, metavar="N", help="Largest fleet to try. Default: 64.")
    group.add_argument("--num-requests", type=int, metavar="N", help="Use only the first N requests of the trace.")
    group.add_argument("--speedup", type=float, default=1.0, metavar="X", help="Replay X times faster. Default: 1.")
    group.add_argument("--exhaustive", action="store_true", help="Try every split of prefill and decode workers.")
    group.add_argument(
        "--check",
        type=expand_home,
        metavar="FLEET.TOML",
        help="Only check whether this fleet keeps the goal: exit code 1 if not.",
    )
    group.add_argument("--fleet-file", type=expand_home, metavar="FILE", help="Write the picked fleet as fleet.toml.")
    group.add_argument(
        "--svg", type=expand_home, metavar="FILE", help="Write a plot of price and share of good requests."
    )


def plan_for_trace(args: argparse.Namespace) -> int:
    from stoker.cli.sim import trace_workload
    from stoker.sim.fleet_search import FleetSearch, SearchGoal
    from stoker.sim.summary import LatencyGoal

    latency = LatencyGoal(*(None if ms is None else ms / 1e3 for ms in (args.goal_ttft_ms, args.goal_itl_ms)))
    goal = SearchGoal(latency, args.goal_share)
    options = _options(args)
    workload = trace_workload(args.trace, args.num_requests, args.speedup)
    search = FleetSearch(workload, goal, args.max_gpus, _progress, exhaustive=args.exhaustive)
    if args.check is not None:
        return _check(args.check, search, options[0], goal)
    result = search.run(options)
    _write_files(args, result)
    print_result(_as_json(result) if args.json else _text(result, goal))
    return 0 if result.picked is not None else _MISSED


def _options(args: argparse.Namespace) -> list[FleetOption]:
    import stoker
    from stoker.sim.calibration import read_calibration
    from stoker.sim.fleet_search import FleetOption

    if not args.calibration:
        raise ConfigError("give the workers' speed with --calibration FILE; `stoker calibrate` writes one")
    prices = args.gpu_hour_price or [1.0] * len(args.calibration)
    if len(prices) != len(args.calibration):
        raise ConfigError(
            f"{len(prices)} --gpu-hour-price for {len(args.calibration)} --calibration; give one for each"
        )
    for name, values in (("--gpu-hour-price", prices), ("--kv-ram-gib", args.kv_ram_gib)):
        if any(not 0 <= value < 1e9 for value in values):
            raise ConfigError(f"{name}: must not be negative")
    read = [read_calibration(path, stoker.__version__, args.model) for path in args.calibration]
    return [
        FleetOption(one, ram, price)
        for one, price in zip(read, prices, strict=True)
        for ram in args.kv_ram_gib or [0.0]
    ]


def _progress(one: SearchedFleet) -> None:
    print_message(f"simulated {one.words()}: {one.good_share:.1%} of the requests keep the goal", sys.stderr)


def _check(path: Path, search: FleetSearch, option: FleetOption, goal: SearchGoal) -> int:
    """Simulate the fleet of a file."""
    from stoker.sim.fleet_search import binding_constraint

    found = search.evaluate(0, option, _fleet_of(path))
    if found.good_share >= goal.share:
        print_result(f"{path}: {found.words()} keep the goal for {found.good_share:.1%} of the requests.")
        return 0
    print_result(f"{path}: {binding_constraint(found, goal)}")
    return _MISSED


def _fleet_of(path: Path) -> Any:
    from stoker.sim.simulation import SimFleet

    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--check {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--check {path}: {error}") from None
    counts = {"unified": 0, "prefill": 0, "decode": 0}
    for worker in tables.get("workers", []):
        role, count = worker.get("role", "unified"), worker.get("count", 1)
        if role not in counts or not isinstance(count, int) or count < 0:
            raise ConfigError(f"--check {path}: role={role!r}, count={count!r}: not a kind of workers")
        counts[role] += count
    return SimFleet(**counts, host_gib=float(tables.get("store", {}).get("host_gib", 0)))


def _text(result: SearchResult, goal: SearchGoal) -> str:
    rows: list[tuple[str, ...]] = [("", "FLEET", "GPUS", "PRICE/H", "GOOD", "TTFT P90", "ITL P90", "HIT", "LAYOUT")]
    for one in result.frontier():
        numbers = (one.summary.ttft_ms.p90, one.summary.itl_ms.p90)
        times = ["-" if value is None else f"{value:.0f} ms" for value in numbers]
        cells = (one.words(), str(one.gpus), f"{one.price_per_hour:g}", f"{one.good_share:.1%}", *times)
        rows.append(("*" if one is result.picked else "", *cells, f"{one.summary.hit_ratio:.1%}", one.option.name))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    kinds = {one.option.calibration.kind for one in result.tried}
    if "estimate" in kinds:
        lines.append("Times of at least one layout are closed-form estimates and not measurements.")
    if result.picked is None:
        return "\n".join([*lines, "", f"No fleet keeps the goal for {goal.share:.0%} of the requests.", result.binding])
    lines += ["", f"Picked: {result.picked.words()} ({result.picked.option.name})."]
    return "\n".join([*lines, *([f"One worker less: {result.binding}"] if result.binding else [])])


def _as_json(result: SearchResult) -> str:
    def plain(one: SearchedFleet) -> dict[str, Any]:
        return {
            "fleet": asdict(one.fleet),
            "gpus": one.gpus,
            "price_per_hour": one.price_per_hour,
            "good_share": one.good_share,
            "layout": one.option.name,
            "summary": asdict(one.summary),
        }

    picked = None if result.picked is None else plain(result.picked)
    frontier = [plain(one) for one in result.frontier()]
    return json.dumps(
        {"picked": picked, "binding": result.binding, "simulated": len(result.tried), "frontier": frontier}
    )


def _write_files(args: argparse.Namespace, result: SearchResult) -> None:
    from stoker.sim.report import svg_plot

    files = []
    if args.fleet_file is not None and result.picked is not None:
        files.append(("--fleet-file", args.fleet_file, _fleet_toml(result.picked)))
    if args.svg is not None:
        points: Sequence[tuple[float, float]] = [
            (one.price_per_hour, 100 * one.good_share) for one in result.frontier()
        ]
        lines = {"best fleet of each price": points}
        files.append(("--svg", args.svg, svg_plot("Requests that keep the goal", "price per hour", "%", lines) + "\n"))
    for flag, path, text in files:
        try:
            path.write_text(text)
        except OSError as error:
            raise ConfigError(f"{flag} {path}: {error.strerror}") from None


def _fleet_toml(one: SearchedFleet) -> str:
    lines = ["# Written by `stoker plan --trace`. Set the path of the model, and the GPUs of each worker (`devices`)."]
    fleet = one.fleet
    for role, count in (("unified", fleet.unified), ("prefill", fleet.prefill), ("decode", fleet.decode)):
        if count:
            lines += ["", "[[workers]]", f'role = "{role}"', f"count = {count}"]
            lines.append(f"model = {json.dumps(one.option.calibration.model)}")
    if fleet.host_gib:
        lines += ["", "[store]", f"host_gib = {fleet.host_gib * fleet.num_workers:g} # for all workers of this machine"]
    return "\n".join(lines) + "\n"

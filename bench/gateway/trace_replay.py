"""Replay recorded traces through the real router on modelled workers, beside simple policies on the same model.

The model is that of bench/support/trace_model.py. The router gets what KV events would tell it (blocks stored and
evicted) and the workers' prefill speed; it knows backlogs from its own load book. Its workers evict blocks in the order of
our workers' pools, unless --lru is given; the simple policies' workers evict by last use. `shared` is one store that all
workers read for free, and the router is told so. There is no decoding in this model, so requests ask for 0 output
tokens.

The aims: a hit ratio not below `sticky` with waits below `aware`, and with a shared store waits not above `shared`.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.contract import Needs, Report, Result
from bench.support import trace_model
from bench.support.trace_model import BLOCK_TOKENS, POLICIES, LruCache, PolicyOutcome, TraceRequest
from stoker.base.ids import BlockId, WorkerId
from stoker.fleet.fleet import Fleet
from stoker.fleet.load_book import LoadBook
from stoker.fleet.spec import LoadReport, WorkerSpec
from stoker.kv.blocks.free_blocks import FreeBlocks
from stoker.routing.query import Route, RouteQuery
from stoker.routing.router import PrefixIndexes, Router
from stoker.routing.settings import RouterSettings

NAME = "trace_replay"
HELP = "hit ratio and waiting time of recorded traces through the real router, on modelled workers"
TRACES: dict[trace_model.TraceFormat, str] = {
    "mooncake": "traces/mooncake_conversation.jsonl.gz",
    "sessions": "traces/claude_code_sessions.jsonl.gz",
}
NEEDS = Needs(data=tuple(TRACES.values()))
_FREE_FETCHES = {"host_tokens_per_s": 1e15, "disk_tokens_per_s": 1e15}  # as in the model


class PoolCache:
    """A prefix cache whose blocks are evicted in the order of our workers' pools."""

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._now_s = 0.0
        self._free = FreeBlocks(())

    def set_time(self, now_s: float) -> None:
        self._now_s = now_s

    def match(self, path: Sequence[int]) -> int:
        return next((at for at, block in enumerate(path) if BlockId(block) not in self._free), len(path))

    def insert(self, path: Sequence[int]) -> tuple[list[int], list[int]]:
        new: list[int] = []
        for block in map(BlockId, reversed(path)):
            was_matched = block in self._free
            if was_matched:
                self._free.remove(block)
            else:
                new.append(block)
            self._free.add_named(block, self._now_s, was_matched=was_matched)
        excess = int(max(0, len(self._free) - self._capacity))
        return new, [self._free.pop() for _ in range(excess)]


def replay(
    trace: Sequence[TraceRequest],
    num_workers: int,
    capacity: float,
    *,
    shared: bool,
    session_ids: bool,
    settings: RouterSettings,
    lru: bool,
) -> PolicyOutcome:
    """Replay the trace with our router. The loop is that of trace_model.simulate, with the choice replaced."""
    speed = trace_model.prefill_speed(trace, num_workers)
    fleet, load_book, indexes = Fleet(), LoadBook(), PrefixIndexes()
    names = [WorkerId(f"w{n}") for n in range(num_workers)]
    start_s = trace[0].arrival_s
    for name in names:
        fleet.add(WorkerSpec(worker_id=name, url="", models=("m",)), start_s)
        fleet.saw_report(name, LoadReport(prefill_tokens_per_s=speed), start_s)
    router = Router(fleet, load_book, indexes, settings=settings)
    index = indexes["m"]
    for name in names if shared else ():
        index.share(name, {"CPU": "store"})
    make_cache = LruCache if lru else PoolCache
    caches: list[LruCache | PoolCache]
    caches = [LruCache(capacity * num_workers)] * num_workers if shared else [make_cache(capacity) for _ in names]
    backlog, now_s = [0.0] * num_workers, start_s
    hit, work, waits_s = 0, [0] * num_workers, []
    running: list[tuple[float, int, Route]] = []
    for number, request in enumerate(trace):
        done, now_s = speed * (request.arrival_s - now_s), request.arrival_s
        backlog = [max(0.0, tokens - done) for tokens in backlog]
        while running and running[0][0] <= now_s:
            end_s, _, route = heapq.heappop(running)
            route.first_token(end_s)
            route.end(end_s)
        query = RouteQuery(
            model="m",
            keys=request.blocks,
            block_tokens=BLOCK_TOKENS,
            num_tokens=request.prompt_tokens,
            max_output_tokens=0,
            session=str(request.session) if session_ids and request.session is not None else None,
        )
        route = router.route(query, now_s)
        worker = names.index(route.decode.reservation.worker_id)
        caches[worker].set_time(now_s)
        found = caches[worker].match(request.blocks) * BLOCK_TOKENS
        new, evicted = caches[worker].insert(request.blocks)
        medium = "CPU" if shared else "GPU"
        index.stored(names[worker], new, medium)
        index.removed(names[worker], evicted, medium)
        hit += found
        work[worker] += request.prompt_tokens - found
        backlog[worker] += request.prompt_tokens - found
        waits_s.append(backlog[worker] / speed)
        heapq.heappush(running, (now_s + waits_s[-1], number, route))
    while running:
        end_s, _, route = heapq.heappop(running)
        route.end(end_s)
    assert load_book.totals().requests == load_book.totals().prefill_tokens == 0
    return trace_model.outcome(hit, sum(request.prompt_tokens for request in trace), waits_s, work)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", nargs="?", type=Path, help="trace file (default: the data folder's of that format)")
    parser.add_argument("--format", choices=tuple(TRACES), default="mooncake", help="default: %(default)s")
    parser.add_argument("--session-ids", action="store_true", help="tell the router the trace's session ids")
    parser.add_argument("--lru", action="store_true", help="our workers' caches evict by last use, as the others' do")
    parser.add_argument("--nodes", default="4,8", help="numbers of workers (default: %(default)s)")
    parser.add_argument("--caps", default="1000,4000,inf", help="blocks of a worker's cache (default: %(default)s)")
    parser.add_argument("--policy", default="cost", help="the router's policy (default: %(default)s)")
    parser.add_argument("--baselines", type=Path, metavar="FILE", help="keep the simple policies' results in this file")


def run(args: argparse.Namespace) -> Report:
    path = args.trace or args.data / TRACES[args.format]
    trace = trace_model.read_trace(path, args.format)
    keys = trace_model.session_keys(trace)
    known = json.loads(args.baselines.read_text()) if args.baselines and args.baselines.exists() else {}
    rows, report = [], Report()
    for num_workers in map(int, args.nodes.split(",")):
        for cap in args.caps.split(","):
            capacity, name = math.inf if cap == "inf" else int(cap), f"{num_workers}/{cap}"
            if name not in known:
                known[name] = {
                    policy: asdict(trace_model.simulate(trace, num_workers, capacity, policy, keys))
                    for policy in POLICIES
                }
            settings = RouterSettings(policy=args.policy)
            options: dict[str, Any] = {"session_ids": args.session_ids, "settings": settings, "lru": args.lru}
            ours = replay(trace, num_workers, capacity, shared=False, **options)
            options["settings"] = replace(settings, cost=replace(settings.cost, **_FREE_FETCHES))
            ours_shared = replay(trace, num_workers, capacity, shared=True, **options)
            row = {**known[name], "ours": asdict(ours), "ours_shared": asdict(ours_shared)}
            rows.append({"workers": num_workers, "blocks": cap, **row})
            cells = " | ".join(f"{policy} {_cell(found)}" for policy, found in row.items())
            print(f"{num_workers} workers, {cap} blocks: {cells}; {_verdict(row)}", flush=True)
            report.results += _results(f"{args.format}, {_case(num_workers, cap, args)}", row)
    if args.baselines:
        args.baselines.write_text(json.dumps(known))
    report.details = rows
    return report


def _case(num_workers: int, cap: str, args: argparse.Namespace) -> str:
    size = "unbounded caches" if cap == "inf" else f"{int(cap):,} blocks each"
    return f"{num_workers} workers, {size}" + (", session ids" if args.session_ids else "")


def _results(case: str, row: dict[str, Any]) -> list[Result]:
    ours, store = row["ours"], row["ours_shared"]
    sticky, aware, shared = "sticky sessions (model)", "cache-aware greedy (model)", "shared store (model)"
    found = [
        Result(case, "hit ratio", "%", 100 * ours["hit"], "higher", sticky, 100 * row["sticky"]["hit"], "baseline")
    ]
    for metric, key in (("mean wait", "mean_wait_s"), ("p90 wait", "p90_wait_s")):
        found.append(Result(case, metric, "s", ours[key], "lower", aware, row["aware"][key], "baseline"))
        found.append(
            Result(f"{case}, shared store", metric, "s", store[key], "lower", shared, row["shared"][key], "baseline")
        )
    return found


def _cell(found: dict[str, float]) -> str:
    return f"{found['hit']:.2%} {found['mean_wait_s']:.2f}/{found['p90_wait_s']:.2f} s"


def _verdict(row: dict[str, Any]) -> str:
    """Say which aims are missed."""
    ours, store = row["ours"], row["ours_shared"]
    missed = [] if round(ours["hit"], 4) >= round(row["sticky"]["hit"], 4) else ["hit ratio"]
    waits = ("mean_wait_s", "p90_wait_s")
    missed += [name for name in waits if ours[name] >= row["aware"][name]]
    missed += [f"shared {name}" for name in waits if round(store[name], 4) > round(row["shared"][name], 4)]
    return "missed: " + ", ".join(missed) if missed else "all aims reached"

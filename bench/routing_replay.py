"""Replay of recorded traces through the real Router on modelled workers, beside simple policies on the same model.

  python bench/routing_replay.py --trace-stats PATH/trace_stats.py mooncake_conversation.jsonl.gz
  python bench/routing_replay.py --trace-stats PATH/trace_stats.py --format sessions claude_code_sessions.jsonl.gz [--session-ids]

The model is trace_stats.simulate_nodes': N workers prefill at one speed, such that without any cache they would be busy
all the time; each has a cache of blocks, which evicts by last use alone for the simple policies, and in the order of our workers'
pools for the router (but --lru); a request waits for the backlog of its worker and for its own misses. The
router is told what KV events would tell it (blocks stored and evicted) and the workers' speed; it knows backlogs by its
own load_book. `shared` is one store that all workers read for nothing, and the router is told so: what one stores, all have. There
is no decoding in this model, so outputs are asked as 0.
"""

from __future__ import annotations

import argparse
import heapq
import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from stoker.base.ids import BlockId, WorkerId
from stoker.fleet.fleet import Fleet
from stoker.fleet.load_book import LoadBook
from stoker.fleet.spec import LoadReport, WorkerSpec
from stoker.kv.blocks.free_blocks import FreeBlocks
from stoker.routing.query import Route, RouteQuery
from stoker.routing.router import PrefixIndexes, Router
from stoker.routing.settings import RouterSettings

FREE_FETCHES = {"host_tokens_per_s": 1e15, "disk_tokens_per_s": 1e15}  # as in the model
BASELINES = ("random", "least", "sticky", "aware", "shared")


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("trace_stats", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["trace_stats"] = module
    spec.loader.exec_module(module)
    return module


class Cache:
    """trace_stats' LRUCache, which also says what came and what went."""

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._blocks: dict[int, None] = {}  # the least recently used first

    def at(self, now: float) -> None:
        """The time, from now on."""

    def match(self, path: tuple[int, ...]) -> int:
        blocks = self._blocks
        return next((at for at, block in enumerate(path) if block not in blocks), len(path))

    def insert(self, path: tuple[int, ...]) -> tuple[list[int], list[int]]:
        blocks = self._blocks
        new = [block for block in path if blocks.pop(block, 0) == 0]
        blocks.update(dict.fromkeys(reversed(path)))
        over = len(blocks) - self._capacity
        if over <= 0:
            return new, []
        gone = []
        for block in blocks:
            gone.append(block)
            if len(gone) >= over:
                break
        for block in gone:
            del blocks[block]
        return new, gone


class PoolCache:
    """The same with blocks that go in the order of our workers' pools (kv/blocks/free_blocks.py)."""

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._now = 0.0
        self._free = FreeBlocks(())

    def at(self, now: float) -> None:
        self._now = now

    def match(self, path: tuple[int, ...]) -> int:
        return next((at for at, block in enumerate(path) if BlockId(block) not in self._free), len(path))

    def insert(self, path: tuple[int, ...]) -> tuple[list[int], list[int]]:
        new = []
        for block in map(BlockId, reversed(path)):
            was_found = block in self._free
            if was_found:
                self._free.remove(block)
            else:
                new.append(block)
            self._free.add_named(block, self._now, was_found=was_found)
        return new, [self._free.pop() for _ in range(int(max(0, len(self._free) - self._capacity)))]


def replay(
    trace: list[Any],
    block: int,
    nodes: int,
    capacity: float,
    *,
    shared: bool,
    session_ids: bool,
    settings: RouterSettings,
    lru: bool,
) -> Any:
    """(hit, mean wait, p90 wait, imbalance) of our router; the loop is simulate_nodes', with the choice replaced."""
    total = sum(r.n_in for r in trace)
    speed = total / max(trace[-1].t - trace[0].t, 1e-9) / nodes
    fleet, load_book, indexes = Fleet(), LoadBook(), PrefixIndexes()
    names = [WorkerId(f"w{n}") for n in range(nodes)]
    for name in names:
        fleet.add(WorkerSpec(worker_id=name, url="", models=("m",)), trace[0].t)
        fleet.saw_report(name, LoadReport(prefill_tokens_per_s=speed), trace[0].t)
    router = Router(fleet, load_book, indexes, settings=settings)
    index = indexes["m"]
    for name in names if shared else ():
        index.share(name, {"CPU": "store"})
    of_a_worker = Cache if lru else PoolCache
    caches = [Cache(capacity * nodes)] * nodes if shared else [of_a_worker(capacity) for _ in names]
    backlog, now = [0.0] * nodes, trace[0].t
    hit, work, waits = 0, [0] * nodes, []
    running: list[tuple[float, int, Route]] = []
    for number, r in enumerate(trace):
        done, now = speed * (r.t - now), r.t
        backlog = [max(0.0, b - done) for b in backlog]
        while running and running[0][0] <= now:
            time, _, route = heapq.heappop(running)
            route.first_token(time)
            route.end(time)
        query = RouteQuery(
            model="m",
            keys=r.blocks,
            block_tokens=block,
            num_tokens=r.n_in,
            max_output_tokens=0,
            session=str(r.session) if session_ids and r.session is not None else None,
        )
        route = router.route(query, now)
        node = names.index(route.decode.reservation.worker_id)
        caches[node].at(now)
        found = caches[node].match(r.blocks) * block
        new, gone = caches[node].insert(r.blocks)
        medium = "CPU" if shared else "GPU"
        index.stored(names[node], new, medium)
        index.removed(names[node], gone, medium)
        hit += found
        work[node] += r.n_in - found
        backlog[node] += r.n_in - found
        waits.append(backlog[node] / speed)
        heapq.heappush(running, (now + waits[-1], number, route))
    while running:
        time, _, route = heapq.heappop(running)
        route.end(time)
    assert load_book.totals().requests == load_book.totals().prefill_tokens == 0
    waits.sort()
    return {
        "hit": hit / total,
        "ttft_mean": sum(waits) / len(waits),
        "ttft_p90": waits[min(len(waits) - 1, math.ceil(0.9 * len(waits)) - 1)],
        "imbalance": max(work) * nodes / max(1, sum(work)),
    }


def baselines(stats: ModuleType, trace: list[Any], block: int, nodes: int, capacity: float, keys: list[Any]) -> Any:
    made = {}
    for policy in BASELINES:
        one = stats.simulate_nodes(trace, block, nodes, capacity, policy, keys)
        made[policy] = {
            "hit": one.hit,
            "ttft_mean": one.ttft_mean,
            "ttft_p90": one.ttft_p90,
            "imbalance": one.imbalance,
        }
    return made


def cell(one: dict[str, float]) -> str:
    return f"{one['hit']:.2%} {one['ttft_mean']:.2f}/{one['ttft_p90']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument(
        "--trace-stats", type=Path, required=True, help="trace_stats.py, whose model and reader are used"
    )
    parser.add_argument("--format", choices=("mooncake", "sessions"), default="mooncake")
    parser.add_argument("--session-ids", action="store_true", help="tell the router the trace's session ids")
    parser.add_argument(
        "--lru", action="store_true", help="our workers' caches evict by last use alone, as the columns'"
    )
    parser.add_argument("--nodes", default="4,8")
    parser.add_argument("--caps", default="1000,4000,inf")
    parser.add_argument("--policy", default="cost")
    parser.add_argument(
        "--baselines", type=Path, help="keep the other policies' figures in this file, and use them from it"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    stats = load_module(args.trace_stats)
    if args.format == "sessions":
        trace, block = stats.read_sessions(args.trace, 512, 3600.0, 120.0, True, 0), 512
    else:
        trace, block = stats.read_hashed(args.trace, 512, 1e-3), 512
    known = json.loads(args.baselines.read_text()) if args.baselines and args.baselines.exists() else {}
    keys = stats.session_keys(trace, "id" if args.format == "sessions" else "auto", 8)
    rows = []
    print("| nodes | blocks | " + " | ".join(BASELINES) + " | ours | ours, shared |\n|--:|--:|" + "--:|" * 7)
    for nodes in map(int, args.nodes.split(",")):
        for cap in args.caps.split(","):
            capacity, name = math.inf if cap == "inf" else int(cap), f"{nodes}/{cap}"
            if name not in known:
                known[name] = baselines(stats, trace, block, nodes, capacity, keys)
            settings = RouterSettings(policy=args.policy)
            options: dict[str, Any] = {"session_ids": args.session_ids, "settings": settings, "lru": args.lru}
            ours = replay(trace, block, nodes, capacity, shared=False, **options)
            options["settings"] = replace(settings, cost=replace(settings.cost, **FREE_FETCHES))
            ours_shared = replay(trace, block, nodes, capacity, shared=True, **options)
            base = known[name]
            rows.append({"nodes": nodes, "cap": cap, **base, "ours": ours, "ours_shared": ours_shared})
            cells = [cell(base[policy]) for policy in BASELINES]
            print(
                f"| {nodes} | {cap} | "
                + " | ".join([*cells, cell(ours), cell(ours_shared)])
                + f" | {verdict(rows[-1])}",
                flush=True,
            )
    if args.baselines:
        args.baselines.write_text(json.dumps(known))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def verdict(row: dict[str, Any]) -> str:
    """What of the two aims is missed: hits of `sticky` with waits below `aware`; waits of `shared` with a shared store."""
    ours, store = row["ours"], row["ours_shared"]
    missed = [] if round(ours["hit"], 4) >= round(row["sticky"]["hit"], 4) else ["hit"]
    missed += [name for name in ("ttft_mean", "ttft_p90") if ours[name] >= row["aware"][name]]
    missed += [
        f"shared {name}" for name in ("ttft_mean", "ttft_p90") if round(store[name], 4) > round(row["shared"][name], 4)
    ]
    return "missed: " + ", ".join(missed) if missed else "all reached"


if __name__ == "__main__":
    main()

"""A recorded trace through real engines' schedulers and a real, shared KV store: what is found again, by whom, after what.

    python bench/store_replay.py ../shared/data/traces/mooncake_conversation.jsonl.gz OUT.json [--requests 3000]

Each of the trace's blocks (512 tokens) becomes one of BLOCK_TOKENS tokens with BLOCK_BYTES of KV; the model is left out (any
token will do), everything else is real: scheduler, pool, write-behind, host tier in shared memory, disk tier, loads with
their checksums. Workers are separate engines that share the store; requests go to them by turns (`round_robin`) or to the
worker that had the conversation before (`sticky`).

`ram_quarter`: the RAM tier holds a quarter of the trace's blocks. `restart`: in the middle all workers are killed (SIGKILL),
the shared memory is lost too, and new ones go on with what the disk has.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from stoker.base.clock import RealClock
from stoker.base.config import EngineSettings, HandoffSettings, StoreSettings
from stoker.base.ids import RequestId
from stoker.engine.loop import Engine
from stoker.engine.rates import StepRates
from stoker.engine.store import build_store
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.blocks.pool import BlockPool
from stoker.kv.blocks.transfer import KvIdentity
from stoker.kv.device.device_kv import DeviceKv
from stoker.kv.peer.lease_book import LeaseBook
from stoker.kv.store.tiers.host.host_memory import remove_host_store
from stoker.sched.plan import StepPlan, StepResult
from stoker.sched.request import GenerateRequest, SamplingParams
from stoker.sched.scheduler import Scheduler, SchedulerConfig

BLOCK_TOKENS = 4
LAYOUT = KvLayout(num_layers=1, num_heads=1, head_dim=128, block_tokens=BLOCK_TOKENS, dtype="float32", dtype_bytes=4)
BLOCK_BYTES = LAYOUT.block_bytes
PREFILL_TOKENS_PER_S = 10.0  # slow enough that whatever is found is worth loading
FINGERPRINT = "replay"
Path_ = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    plan: StepPlan

    def wait(self) -> StepResult:
        return StepResult([[1] if span.samples else [] for span in self.plan.spans], 0.001)


class NoModel:
    """In place of the Runner. A block's KV is its tokens, so that a wrong one can be seen."""

    def __init__(self, kv: DeviceKv) -> None:
        self._kv = kv

    def launch(self, plan: StepPlan) -> Step:
        if plan.fresh_blocks:
            self._kv.clear(plan.fresh_blocks)
        return Step(plan)


class Worker:
    def __init__(self, store: StoreSettings, device_blocks: int) -> None:
        self._kv = DeviceKv(LAYOUT, device_blocks, torch.device("cpu"))
        rates = StepRates()
        identity = KvIdentity("none", "none", LAYOUT.identity, LAYOUT.dtype)
        settings = EngineSettings(store=store, handoff=HandoffSettings(transports=("tcp",)))
        self.store = build_store(settings, self._kv, identity, FINGERPRINT, lambda: PREFILL_TOKENS_PER_S, lambda: None)
        self._pool = BlockPool(device_blocks)
        config = SchedulerConfig(BLOCK_TOKENS, 1 << 20, 4, FINGERPRINT, None, 100_000)
        self._scheduler = Scheduler(config, self._pool)
        self._engine = Engine(self._scheduler, NoModel(self._kv), RealClock(), 0, self.store, LeaseBook(), rates)  # type: ignore[arg-type]
        self._number = 0

    def ask(self, path: Path_) -> int:
        """How many of its blocks were found, anywhere."""
        tokens = [part for block in path for part in _tokens(block)] + [3]
        self._number += 1
        request = GenerateRequest(RequestId(str(self._number)), tokens, len(tokens), SamplingParams(), 1)
        self._engine.add(request, self.store.num_worth_loading(tokens, ""))
        cached = 0
        while self._engine.has_work:
            for chunk in self._engine.step():
                assert chunk.finish is not None
                assert chunk.finish.reason == "length", chunk
                cached = chunk.usage.cached_tokens
            if self._engine.idle:
                time.sleep(0.0002)
        return cached // BLOCK_TOKENS

    def settle(self) -> None:
        """Until what was offered has been written: the trace has seconds between requests, the replay has none."""
        until = time.monotonic() + 30
        while self._pool.num_free < self._pool.num_blocks and time.monotonic() < until:
            self._engine.step()
            time.sleep(0.0002)
        while any(self.store.num_queued) and time.monotonic() < until:
            time.sleep(0.0005)

    def figures(self) -> dict[str, dict[str, int]]:
        return {
            tier.name: {
                "hits": tier.counters.hits,
                "declined": tier.counters.declined,
                "corrupt": tier.backend.stats().corrupt,
            }
            for tier in self.store.tiers
        }


def _tokens(block: int) -> tuple[int, ...]:
    """Different ones for different blocks."""
    return tuple(block // 250**i % 250 + 4 for i in range(BLOCK_TOKENS))


class Sticky:
    def __init__(self, count: int) -> None:
        self._homes: dict[int, int] = {}
        self._next = 0
        self._count = count

    def choose(self, path: Path_) -> int:
        home = next((self._homes[block] for block in reversed(path[1:]) if block in self._homes), None)
        if home is None:
            home = self._next
            self._next = (self._next + 1) % self._count
        self._homes.update(dict.fromkeys(path[1:], home))
        return home


class RoundRobin:
    def __init__(self, count: int) -> None:
        self._next = -1
        self._count = count

    def choose(self, path: Path_) -> int:
        self._next = (self._next + 1) % self._count
        return self._next


def replay(
    out: str, paths: list[Path_], policy: str, store: StoreSettings, workers: int, device_blocks: int, kill_after: int
) -> None:
    """In a process of its own; writes a line for each request. With `kill_after` it ends itself the hard way."""
    fleet = [Worker(store, device_blocks) for _ in range(workers)]
    router = {"sticky": Sticky, "round_robin": RoundRobin}[policy](workers)
    with open(out, "w") as lines:
        for number, path in enumerate(paths):
            worker = fleet[router.choose(path)]
            found = worker.ask(path)
            worker.settle()
            lines.write(f"{found} {len(path)}\n")
            if kill_after and number + 1 == kill_after:
                lines.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        lines.write(json.dumps([worker.figures() for worker in fleet]) + "\n")
    for worker in fleet:
        worker.store.close()


def run(
    paths: list[Path_], policy: str, store: StoreSettings, args: argparse.Namespace, kill_after: int = 0
) -> tuple[list[int], Any]:
    with tempfile.NamedTemporaryFile("r") as out:
        process = multiprocessing.get_context("spawn").Process(
            target=replay, args=(out.name, paths, policy, store, args.workers, args.device_blocks, kill_after)
        )
        process.start()
        process.join()
        lines = out.read().splitlines()
    if kill_after:
        assert process.exitcode == -signal.SIGKILL, process.exitcode
        return [int(line.split()[0]) for line in lines[:kill_after]], None
    assert process.exitcode == 0, process.exitcode
    return [int(line.split()[0]) for line in lines[:-1]], json.loads(lines[-1])


def infinite(paths: list[Path_]) -> list[int]:
    seen: set[int] = set()
    hits = []
    for path in paths:
        hits.append(next((i for i, block in enumerate(path) if block not in seen), len(path)))
        seen.update(path)
    return hits


def device_only(paths: list[Path_], args: argparse.Namespace) -> dict[str, float]:
    """Without a store, for comparison: an LRU of each worker's own."""
    shares = {}
    for name, router in (("round_robin", RoundRobin(args.workers)), ("sticky", Sticky(args.workers))):
        caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(args.workers)]
        hits = 0
        for path in paths:
            cache = caches[router.choose(path)]
            hits += next((i for i, block in enumerate(path) if block not in cache), len(path))
            for block in path:
                cache[block] = None
                cache.move_to_end(block)
            while len(cache) > args.device_blocks:
                cache.popitem(last=False)
        shares[name] = hits / sum(map(len, paths))
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--device-blocks", type=int, default=400)
    parser.add_argument("--folder", type=Path, help="for the disk tier (default: a temporary one)")
    args = parser.parse_args()
    with gzip.open(args.trace, "rt") as file:
        paths = [tuple(json.loads(line)["hash_ids"][: args.device_blocks - 2]) for line in file][: args.requests]
    total = sum(map(len, paths))
    unique = len({block for path in paths for block in path})
    best = infinite(paths)
    results: dict[str, Any] = {
        "requests": len(paths), "blocks": total, "unique_blocks": unique, "infinite": sum(best) / total,
        "device_only": device_only(paths, args),
    }  # fmt: skip
    print(json.dumps(results), flush=True)
    gib = BLOCK_BYTES / (1 << 30)
    slot_gib = (BLOCK_BYTES + 512) / (1 << 30)  # the host tier's own table takes its part
    for name, ram_blocks, policy, restarts in (
        ("round_robin", unique, "round_robin", False),
        ("sticky", unique, "sticky", False),
        ("ram_quarter", unique // 4, "round_robin", False),
        ("restart", unique // 4, "round_robin", True),
    ):
        folder = Path(tempfile.mkdtemp(prefix="stoker-replay-", dir=args.folder))
        store = StoreSettings(
            name=f"replay-{os.getpid()}",
            host_gib=ram_blocks * slot_gib,
            disk_dir=str(folder),
            disk_gib=2 * unique * (gib + 8192 / (1 << 30)),
        )
        started_s = time.monotonic()
        try:
            if restarts:
                half = len(paths) // 2
                first, _ = run(paths, policy, store, args, kill_after=half)
                remove_host_store(store.name or "")
                second, figures = run(paths[half:], policy, store, args)
                hits = first + second
                # What the first half left behind and the second asks for, in whole prefixes.
                share = sum(second) / sum(best[half:])
                results[name] = {"second_half_of_infinite": share, "tiers": figures}
            else:
                hits, figures = run(paths, policy, store, args)
                results[name] = {"tiers": figures}
            results[name] |= {
                "hit": sum(hits) / total,
                "of_infinite": sum(hits) / sum(best),
                "seconds": time.monotonic() - started_s,
            }
            print(name, json.dumps(results[name]), flush=True)
        finally:
            remove_host_store(store.name or "")
            shutil.rmtree(folder)
    args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

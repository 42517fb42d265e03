"""The measuring part of `store_replay`."""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.contract import Report, Result
from stoker.base.clock import RealClock
from stoker.base.config import EngineSettings, HandoffSettings, StoreSettings
from stoker.base.ids import RequestId
from stoker.engine.loop import Engine
from stoker.engine.store import build_store
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.blocks.pool import BlockPool
from stoker.kv.blocks.transfer import KvIdentity
from stoker.kv.device.device_kv import DeviceKv
from stoker.kv.peer.lease_book import LeaseBook
from stoker.kv.store.tiers.host.host_memory import remove_host_store
from stoker.sched.plan import StepPlan, StepResult
from stoker.sched.request import GenerateRequest, SamplingParams
from stoker.sched.scheduler import Scheduler
from stoker.sched.scheduler_config import SchedulerConfig
from stoker.sched.step_rates import StepRates

BLOCK_TOKENS = 4
LAYOUT = KvLayout.of(num_layers=1, num_heads=1, width=128, block_tokens=BLOCK_TOKENS, dtype="float32", dtype_bytes=4)
BLOCK_BYTES = LAYOUT.block_bytes
PREFILL_TOKENS_PER_S = 10.0  # slow enough that every stored block is worth loading
FINGERPRINT = "replay"
BlockPath = tuple[int, ...]


@dataclass(frozen=True)
class ReplayStep:
    plan: StepPlan

    def wait(self) -> StepResult:
        return StepResult([[1] if span.samples else [] for span in self.plan.spans], 0.001)


class NoModel:
    """Replaces the Runner: every sampled token is 1, and only fresh blocks are cleared."""

    def __init__(self, kv: DeviceKv) -> None:
        self._kv = kv

    def launch(self, plan: StepPlan) -> ReplayStep:
        for kv_set, fresh in enumerate(plan.fresh_blocks):
            if fresh:
                self._kv.clear(fresh, kv_set)
        return ReplayStep(plan)


class ReplayWorker:
    """An engine without a model: scheduler, pool and store are real."""

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

    def send(self, path: BlockPath) -> int:
        """Run one request; return how many of its blocks were found in any tier."""
        tokens = [part for block in path for part in _tokens(block)] + [3]
        self._number += 1
        request = GenerateRequest(RequestId(str(self._number)), tokens, len(tokens), SamplingParams(), 1)
        self._engine.add(request, self.store.num_worth_loading(tokens, ""))
        cached = 0
        while self._engine.has_work:
            for chunk in self._engine.step():
                assert chunk.finish is not None
                assert chunk.finish.reason == "length", chunk
                assert chunk.usage is not None
                cached = chunk.usage.cached_tokens
            if self._engine.idle:
                time.sleep(0.0002)
        return cached // BLOCK_TOKENS

    def settle(self) -> None:
        """Wait until the offered blocks are written: the trace has seconds between requests, the replay has none."""
        until = time.monotonic() + 30
        while self._pool.num_free < self._pool.num_blocks and time.monotonic() < until:
            self._engine.step()
            time.sleep(0.0002)
        while any(self.store.num_queued) and time.monotonic() < until:
            time.sleep(0.0005)

    def tier_counts(self) -> dict[str, dict[str, int]]:
        return {
            tier.name: {
                "hits": tier.counters.hits,
                "declined": tier.counters.declined,
                "corrupt": tier.backend.stats().corrupt,
            }
            for tier in self.store.tiers
        }


def _tokens(block: int) -> tuple[int, ...]:
    """The tokens of a block: different blocks have different tokens."""
    return tuple(block // 250**i % 250 + 4 for i in range(BLOCK_TOKENS))


class Sticky:
    def __init__(self, count: int) -> None:
        self._homes: dict[int, int] = {}
        self._next = 0
        self._count = count

    def choose(self, path: BlockPath) -> int:
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

    def choose(self, path: BlockPath) -> int:
        self._next = (self._next + 1) % self._count
        return self._next


def replay(
    out: str,
    paths: list[BlockPath],
    policy: str,
    store: StoreSettings,
    workers: int,
    device_blocks: int,
    kill_after: int,
) -> None:
    """Run in a process of its own; write one line per request. With `kill_after` it kills itself after that many."""
    fleet = [ReplayWorker(store, device_blocks) for _ in range(workers)]
    router = Sticky(workers) if policy == "sticky" else RoundRobin(workers)
    with open(out, "w") as lines:
        for number, path in enumerate(paths):
            worker = fleet[router.choose(path)]
            found = worker.send(path)
            worker.settle()
            lines.write(f"{found} {len(path)}\n")
            if kill_after and number + 1 == kill_after:
                lines.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        lines.write(json.dumps([worker.tier_counts() for worker in fleet]) + "\n")
    for worker in fleet:
        worker.store.close()


def run_process(
    paths: list[BlockPath], policy: str, store: StoreSettings, args: argparse.Namespace, kill_after: int = 0
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


def infinite(paths: list[BlockPath]) -> list[int]:
    """Hits of each request with an unbounded cache."""
    seen: set[int] = set()
    hits = []
    for path in paths:
        hits.append(next((i for i, block in enumerate(path) if block not in seen), len(path)))
        seen.update(path)
    return hits


def device_only(paths: list[BlockPath], args: argparse.Namespace) -> dict[str, float]:
    """Hit ratios without a store: each worker has an LRU cache of its own."""
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


def measure_all(args: argparse.Namespace, trace: Path) -> Report:
    with gzip.open(trace, "rt") as file:
        paths = [tuple(json.loads(line)["hash_ids"][: args.device_blocks - 2]) for line in file][: args.requests]
    total = sum(map(len, paths))
    unique = len({block for path in paths for block in path})
    best = infinite(paths)
    found: dict[str, Any] = {
        "requests": len(paths), "blocks": total, "unique_blocks": unique, "infinite": sum(best) / total,
        "device_only": device_only(paths, args),
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    gib = BLOCK_BYTES / (1 << 30)
    slot_gib = (BLOCK_BYTES + 512) / (1 << 30)  # with the host tier's own table
    for name, (policy, ram_share, restarts) in CONFIGURATIONS.items():
        folder = Path(tempfile.mkdtemp(prefix="stoker-replay-", dir=args.folder))
        store = StoreSettings(
            name=f"replay-{os.getpid()}",
            host_gib=int(unique * ram_share) * slot_gib,
            disk_dir=str(folder),
            disk_gib=2 * unique * (gib + 8192 / (1 << 30)),
        )
        begin_s = time.monotonic()
        try:
            if restarts:
                half = len(paths) // 2
                first, _ = run_process(paths, policy, store, args, kill_after=half)
                remove_host_store(store.name or "")
                second, tiers = run_process(paths[half:], policy, store, args)
                hits = first + second
                found[name] = {"second_half_of_infinite": sum(second) / sum(best[half:]), "tiers": tiers}
            else:
                hits, tiers = run_process(paths, policy, store, args)
                found[name] = {"tiers": tiers}
            seconds = time.monotonic() - begin_s
            found[name] |= {"hit": sum(hits) / total, "of_infinite": sum(hits) / sum(best), "seconds": seconds}
            print(name, json.dumps(found[name]), flush=True)
        finally:
            remove_host_store(store.name or "")
            shutil.rmtree(folder)
    return Report(_results(found), found)


# Name -> policy, RAM tier as a share of the trace's different blocks, whether all workers are killed in the middle.
CONFIGURATIONS = {
    "shared store, round robin": ("round_robin", 1.0, False),
    "shared store, sticky sessions": ("sticky", 1.0, False),
    "RAM tier a quarter of the blocks, disk below": ("round_robin", 0.25, False),
    "the same, all workers killed and RAM lost in the middle": ("round_robin", 0.25, True),
}


def _results(found: dict[str, Any]) -> list[Result]:
    made = []
    for case, (policy, _, _) in CONFIGURATIONS.items():
        hit, alone = found[case]["hit"], found["device_only"][policy]
        notes = f"{found[case]['of_infinite']:.2%} of an unbounded cache"
        other = f"no store, {policy.replace('_', ' ')}"
        made.append(Result(case, "hit ratio", "%", 100 * hit, "higher", other, 100 * alone, "baseline", notes))
    return made

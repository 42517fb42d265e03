"""Recorded traces, and a simple model of workers on which routing policies are compared.

A trace holds lengths and block ids, no text. The model: N workers prefill at one speed, chosen so that without any
cache hit they would be busy all the time. Each has a prefix cache of a number of blocks with LRU eviction. A request
waits for the backlog of its worker and for its own uncached tokens. There is no decoding. The model compares policies;
it does not predict latencies.

Only complete blocks count as hits. A request's blocks enter the cache when it arrives, and are touched from the last to
the first, so that the end of a prompt is evicted before its beginning.
"""

from __future__ import annotations

import gzip
import json
import math
import random
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

BLOCK_TOKENS = 512
SESSION_SPREAD_S = 3600.0  # recorded sessions start at random times within an hour
LONGEST_PAUSE_S = 120.0  # longer pauses of a recorded session are cut
HUB_BRANCHES = 8  # a block with more different successors belongs to a shared prompt, not to a session

Policy = Literal["random", "least", "sticky", "aware", "shared"]
POLICIES: tuple[Policy, ...] = ("random", "least", "sticky", "aware", "shared")
TraceFormat = Literal["mooncake", "sessions"]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrival_s: float
    prompt_tokens: int
    blocks: tuple[int, ...]  # ids of the complete blocks; equal ids mean equal prefixes
    session: str | None = None
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    hit: float  # share of the prompt tokens that were cached
    mean_wait_s: float
    p90_wait_s: float
    imbalance: float  # computed tokens of the busiest worker over the mean


def read_trace(path: Path, trace_format: TraceFormat) -> list[TraceRequest]:
    return read_mooncake(path) if trace_format == "mooncake" else read_sessions(path)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)


def read_mooncake(path: Path) -> list[TraceRequest]:
    """Mooncake's format: one request a line, with the ids of its blocks of 512 tokens."""
    return [
        TraceRequest(
            row["timestamp"] / 1000,
            row["input_length"],
            tuple(row["hash_ids"][: row["input_length"] // BLOCK_TOKENS]),
            output_tokens=row["output_length"],
        )
        for row in _rows(path)
    ]


def read_sessions(path: Path, seed: int = 0) -> list[TraceRequest]:
    """Agent sessions, one a line. Each starts at a random time; its own pauses are kept up to LONGEST_PAUSE_S.

    Block ids are local to a session. Sessions whose tools and system prompt have the same sizes are taken to share that
    prefix. Small blocks are joined to blocks of 512 tokens. A sub-agent's requests stand where the session called it.
    """
    rng = random.Random(seed)
    ids: dict[Hashable, int] = {}
    found: list[TraceRequest] = []

    def add(session: str, agent: dict[str, Any], start_s: float, block_size: int) -> None:
        joined = max(1, BLOCK_TOKENS // block_size)
        size = block_size * joined
        sizes = (agent.get("tool_tokens"), agent.get("system_tokens"))
        shared_tokens = (sizes[0] or 0) + (sizes[1] or 0)
        clock_s, last_s = start_s, None
        for request in agent.get("requests") or ():
            if last_s is not None:
                clock_s += min(max(0.0, request["t"] - last_s), LONGEST_PAUSE_S)
            last_s = request["t"]
            if request.get("type") == "subagent":
                add(session, request, clock_s, block_size)
                continue
            own_ids = [block for first, count in request["runs"] for block in range(first, first + count)]
            blocks: list[int] = []
            for at in range(min(len(own_ids) // joined, request["in"] // size)):
                last_id = own_ids[(at + 1) * joined - 1]  # ids are chained: the last one stands for all before it
                is_shared = (at + 1) * size <= shared_tokens
                key: Hashable = (sizes, at) if is_shared else (session, blocks[-1] if blocks else None, last_id)
                blocks.append(ids.setdefault(key, len(ids)))
            found.append(TraceRequest(clock_s, request["in"], tuple(blocks), session, request["out"]))

    for row in _rows(path):
        add(row["id"], row, rng.uniform(0, SESSION_SPREAD_S), row["block_size"])
    return sorted(found, key=lambda request: request.arrival_s)


def session_keys(trace: Sequence[TraceRequest]) -> list[Hashable]:
    """What the sticky policy takes as a request's session: the trace's own id, or the first block that is not shared."""
    if any(request.session is not None for request in trace):
        return [request.session if request.session is not None else at for at, request in enumerate(trace)]
    hubs = _hubs(trace)
    return [
        next((block for block in request.blocks if block not in hubs), ("alone", at))
        for at, request in enumerate(trace)
    ]


def _hubs(trace: Sequence[TraceRequest]) -> set[int]:
    """The blocks at and before a point where many different prompts branch off."""
    successors: dict[int, set[int]] = defaultdict(set)
    parents: dict[int, int] = {}
    for request in trace:
        for block, successor in zip(request.blocks, request.blocks[1:], strict=False):
            successors[block].add(successor)
            parents[successor] = block
    hubs: set[int] = set()
    for block, after in successors.items():
        if len(after) > HUB_BRANCHES:
            at: int | None = block
            while at is not None and at not in hubs:
                hubs.add(at)
                at = parents.get(at)
    return hubs


class LruCache:
    """A prefix cache with LRU eviction, which also tells what an insertion added and evicted."""

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._blocks: dict[int, None] = {}  # the least recently used first

    def set_time(self, now_s: float) -> None:
        """LRU needs no clock."""

    def match(self, path: Sequence[int]) -> int:
        """How many leading blocks are cached."""
        return next((at for at, block in enumerate(path) if block not in self._blocks), len(path))

    def insert(self, path: Sequence[int]) -> tuple[list[int], list[int]]:
        """Cache the blocks; return the new ones and the evicted ones."""
        blocks = self._blocks
        new = [block for block in path if blocks.pop(block, 0) == 0]
        blocks.update(dict.fromkeys(reversed(path)))
        excess = len(blocks) - self._capacity
        evicted = []
        if excess > 0:
            for block in blocks:
                evicted.append(block)
                if len(evicted) >= excess:
                    break
            for block in evicted:
                del blocks[block]
        return new, evicted


def prefill_speed(trace: Sequence[TraceRequest], num_workers: int) -> float:
    """Tokens a second of one worker, such that all would be busy all the time without a cache."""
    total = sum(request.prompt_tokens for request in trace)
    return total / max(trace[-1].arrival_s - trace[0].arrival_s, 1e-9) / num_workers


def outcome(hit_tokens: int, total_tokens: int, waits_s: list[float], work: Sequence[int]) -> PolicyOutcome:
    ordered = sorted(waits_s)
    p90 = ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)]
    imbalance = max(work) * len(work) / max(1, sum(work))
    return PolicyOutcome(hit_tokens / total_tokens, sum(ordered) / len(ordered), p90, imbalance)


def simulate(
    trace: Sequence[TraceRequest],
    num_workers: int,
    capacity: float,
    policy: Policy,
    keys: Sequence[Hashable],
    seed: int = 0,
) -> PolicyOutcome:
    """Replay the trace under a simple policy.

    random: any worker. least: the smallest backlog. sticky: where the session's first request went, which is the
    smallest backlog. aware: the smallest backlog plus tokens to compute for this request. shared: as least, over one
    cache that all workers read for free.
    """
    rng = random.Random(seed)
    if policy == "shared":
        caches = [LruCache(capacity * num_workers)] * num_workers
    else:
        caches = [LruCache(capacity) for _ in range(num_workers)]
    speed = prefill_speed(trace, num_workers)
    workers = range(num_workers)
    backlog, now_s = [0.0] * num_workers, trace[0].arrival_s
    home: dict[Hashable, int] = {}
    hit, work, waits_s = 0, [0] * num_workers, []

    def least_loaded() -> int:
        return min(workers, key=lambda worker: (backlog[worker], rng.random()))

    for at, request in enumerate(trace):
        done, now_s = speed * (request.arrival_s - now_s), request.arrival_s
        backlog = [max(0.0, tokens - done) for tokens in backlog]
        if policy == "random":
            worker = rng.randrange(num_workers)
        elif policy == "sticky":
            if keys[at] not in home:
                home[keys[at]] = least_loaded()
            worker = home[keys[at]]
        elif policy == "aware":
            cached = [cache.match(request.blocks) * BLOCK_TOKENS for cache in caches]
            costs = [(backlog[each] - cached[each], rng.random()) for each in workers]
            worker = min(workers, key=costs.__getitem__)
        else:
            worker = least_loaded()
        found = caches[worker].match(request.blocks) * BLOCK_TOKENS
        caches[worker].insert(request.blocks)
        hit += found
        work[worker] += request.prompt_tokens - found
        backlog[worker] += request.prompt_tokens - found
        waits_s.append(backlog[worker] / speed)
    return outcome(hit, sum(request.prompt_tokens for request in trace), waits_s, work)

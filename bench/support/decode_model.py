"""Models of workers for the routing ablation: chunked prefill mixed with decode, and a cache with a slower tier.

The real Router chooses the workers; only the workers are modelled. Both models read Mooncake traces, whose requests have
block ids, prompt lengths and output lengths.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bench.support.trace_model import BLOCK_TOKENS, LruCache, TraceRequest
from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet
from stoker.fleet.load_book import LoadBook
from stoker.fleet.spec import LoadReport, WorkerSpec
from stoker.routing.query import Route, RouteQuery
from stoker.routing.router import PrefixIndexes, Router
from stoker.routing.settings import RouterSettings

CHUNK_TOKENS = 2048  # prompt tokens per step
STEP_S = 0.02  # a decode step with an empty batch
CROWD_TOKENS = 262_144  # resident tokens that double a decode step
CACHE_BLOCKS = 4000
REPORT_S = 1.0  # time between two load reports


@dataclass(eq=False)
class ModelSequence:
    """A request on a modelled worker."""

    request: TraceRequest
    route: Route
    uncomputed: int = 0

    @property
    def tokens(self) -> int:
        return self.request.prompt_tokens + self.request.output_tokens


@dataclass(eq=False)
class ModelWorker:
    """A worker that computes one chunk of one prompt and one token of every decoding sequence per step."""

    worker_id: WorkerId
    tokens_per_s: float
    kv_tokens: int
    cache: LruCache = field(default_factory=lambda: LruCache(CACHE_BLOCKS))
    waiting: deque[ModelSequence] = field(default_factory=deque)
    prefilling: ModelSequence | None = None
    decoding: list[tuple[int, int, ModelSequence]] = field(default_factory=list)  # heap by last step
    resident: int = 0
    step: int = 0
    is_running: bool = False

    def report(self) -> LoadReport:
        used = min(1.0, self.resident / self.kv_tokens)
        return LoadReport(kv_used=used, prefill_tokens_per_s=self.tokens_per_s, step_s=STEP_S)


@dataclass(frozen=True)
class Latency:
    """Mean and 90th percentile of the time to the first token and of the whole request, in seconds."""

    ttft_s: float
    ttft_p90_s: float
    total_s: float
    total_p90_s: float


class DecodeModel:
    """Workers that prefill and decode in the same steps, with bounded KV memory.

    `uneven`: every other worker has half the prefill speed and a quarter of the KV memory.
    """

    def __init__(self, trace: Sequence[TraceRequest], nodes: int, settings: RouterSettings, *, uneven: bool) -> None:
        self.trace, self.begin = trace, trace[0].arrival_s
        speed = 2.2 * sum(one.prompt_tokens for one in trace) / (trace[-1].arrival_s - self.begin) / nodes
        self.fleet, self.indexes = Fleet(), PrefixIndexes()
        self.router = Router(self.fleet, LoadBook(), self.indexes, settings=settings)
        self.workers: dict[WorkerId, ModelWorker] = {}
        for number in range(nodes):
            worker_id, small = WorkerId(f"w{number}"), uneven and number % 2 == 0
            worker = ModelWorker(worker_id, speed / 2 if small else speed, 100_000 if small else 400_000)
            self.workers[worker_id] = worker
            self.fleet.add(WorkerSpec(worker_id=worker_id, url="", models=("m",)), self.begin)
            self.fleet.saw_report(worker_id, worker.report(), self.begin)
        self.events: list[tuple[float, int, ModelWorker | TraceRequest | None, int]] = []
        self.num_events = 0
        self.ttft_s: list[float] = []
        self.total_s: list[float] = []

    def run(self) -> Latency:
        for request in self.trace:
            self._at(request.arrival_s, request)
        self._at(self.begin + REPORT_S, None)
        while len(self.total_s) < len(self.trace):
            now, _, what, steps = heapq.heappop(self.events)
            if what is None:
                for worker in self.workers.values():
                    self.fleet.saw_report(worker.worker_id, worker.report(), now)
                self._at(now + REPORT_S, None)
            elif isinstance(what, ModelWorker):
                self._finish_step(what, steps, now)
            else:
                self._arrive(what, now)
        ttft_s, total_s = sorted(self.ttft_s), sorted(self.total_s)
        p90 = int(0.9 * len(ttft_s))
        return Latency(sum(ttft_s) / len(ttft_s), ttft_s[p90], sum(total_s) / len(total_s), total_s[p90])

    def _at(self, time: float, what: ModelWorker | TraceRequest | None, steps: int = 0) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (time, self.num_events, what, steps))

    def _arrive(self, request: TraceRequest, now: float) -> None:
        query = RouteQuery(model="m", keys=request.blocks, block_tokens=BLOCK_TOKENS, num_tokens=request.prompt_tokens)
        route = self.router.route(query, now)
        worker = self.workers[route.decode.worker.worker_id]
        worker.waiting.append(ModelSequence(request, route))
        if not worker.is_running:
            self._start_step(worker, now)

    def _start_step(self, worker: ModelWorker, now: float) -> None:
        if worker.prefilling is None and worker.waiting:
            first = worker.waiting[0]
            if not worker.resident or worker.resident + first.tokens <= worker.kv_tokens:
                worker.prefilling = worker.waiting.popleft()
                worker.resident += first.tokens
                found = min(worker.cache.match(first.request.blocks) * BLOCK_TOKENS, first.request.prompt_tokens - 1)
                first.uncomputed = first.request.prompt_tokens - found
                new, evicted = worker.cache.insert(first.request.blocks)
                self.indexes["m"].stored(worker.worker_id, new)
                self.indexes["m"].removed(worker.worker_id, evicted)
        worker.is_running = worker.prefilling is not None or bool(worker.decoding)
        if not worker.is_running:
            return
        step_s, steps = 0.0, 1
        if worker.decoding:
            step_s = STEP_S * (1 + worker.resident / CROWD_TOKENS)
        if worker.prefilling is not None:
            chunk = min(CHUNK_TOKENS, worker.prefilling.uncomputed)
            worker.prefilling.uncomputed -= chunk
            step_s += chunk / worker.tokens_per_s
        else:
            steps = max(1, min(worker.decoding[0][0] - worker.step, 10))  # several decode-only steps in one event
        self._at(now + steps * step_s, worker, steps)

    def _finish_step(self, worker: ModelWorker, steps: int, now: float) -> None:
        worker.step += steps
        while worker.decoding and worker.decoding[0][0] <= worker.step:
            _, _, done = heapq.heappop(worker.decoding)
            done.route.end(now)
            worker.resident -= done.tokens
            self.total_s.append(now - done.request.arrival_s)
        first = worker.prefilling
        if first is not None and first.uncomputed <= 0:
            worker.prefilling = None
            first.route.first_token(now)
            self.ttft_s.append(now - first.request.arrival_s)
            last_step = worker.step + max(1, first.request.output_tokens - 1)
            heapq.heappush(worker.decoding, (last_step, self.num_events, first))
        self._start_step(worker, now)


def two_tiers(trace: Sequence[TraceRequest], nodes: int, settings: RouterSettings, fetch_speedup: float = 4.0) -> float:
    """Return the mean wait in seconds with small GPU caches over one shared store that is slower, but never evicts.

    Fetching a block from the store is `fetch_speedup` times as fast as computing it.
    """
    begin = trace[0].arrival_s
    speed = sum(one.prompt_tokens for one in trace) / (trace[-1].arrival_s - begin) / nodes
    settings = replace(settings, cost=replace(settings.cost, disk_tokens_per_s=fetch_speedup * speed))
    fleet, indexes = Fleet(), PrefixIndexes()
    router, index = Router(fleet, LoadBook(), indexes, settings=settings), indexes["m"]
    names = [WorkerId(f"w{number}") for number in range(nodes)]
    for name in names:
        fleet.add(WorkerSpec(worker_id=name, url="", models=("m",)), begin)
        fleet.saw_report(name, LoadReport(prefill_tokens_per_s=speed), begin)
        index.share(name, {"DISK": "store"})
    caches = {name: LruCache(500) for name in names}
    store = LruCache(float("inf"))
    free_at = dict.fromkeys(names, begin)
    running: list[tuple[float, int, Route]] = []
    waited_s = 0.0
    for number, one in enumerate(trace):
        while running and running[0][0] <= one.arrival_s:
            time, _, route = heapq.heappop(running)
            route.first_token(time)
            route.end(time)
        query = RouteQuery(
            model="m", keys=one.blocks, block_tokens=BLOCK_TOKENS, num_tokens=one.prompt_tokens, max_output_tokens=0
        )
        route = router.route(query, one.arrival_s)
        name = route.decode.worker.worker_id
        near = caches[name].match(one.blocks) * BLOCK_TOKENS
        far = max(0, store.match(one.blocks) * BLOCK_TOKENS - near)
        new, evicted = caches[name].insert(one.blocks)
        index.stored(name, new)
        index.removed(name, evicted)
        index.stored(name, store.insert(one.blocks)[0], "DISK")
        busy_s = (one.prompt_tokens - near - far) / speed + far / (fetch_speedup * speed)
        free_at[name] = max(free_at[name], one.arrival_s) + busy_s
        waited_s += free_at[name] - one.arrival_s
        heapq.heappush(running, (free_at[name], number, route))
    return waited_s / len(trace)

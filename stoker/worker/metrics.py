"""The worker's Prometheus metrics, in a registry of their own: no process-wide state."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from stoker.proto.messages import EngineStats, TierReport

_Family = GaugeMetricFamily | CounterMetricFamily

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL_S = (0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600, 1800)

# EngineStats' field, our name, help.
_GAUGES = (
    ("waiting_sequences", "stoker_waiting_sequences", "Sequences that wait to run"),
    ("waiting_tokens", "stoker_waiting_tokens", "Tokens not yet computed of waiting sequences"),
    ("running_sequences", "stoker_running_sequences", "Sequences that run"),
    ("free_blocks", "stoker_kv_blocks_free", "KV blocks that nobody holds"),
    ("cached_blocks", "stoker_kv_blocks_cached", "KV blocks that a prefix may still find"),
    ("num_blocks", "stoker_kv_blocks", "KV blocks in all"),
    ("loading_sequences", "stoker_kv_loading_sequences", "Sequences that wait for KV from elsewhere"),
    ("held_leases", "stoker_kv_leases", "Sequences whose KV is kept for another worker"),
)
_COUNTERS = (
    ("steps", "stoker_steps", "Engine steps"),
    ("step_s", "stoker_step_seconds", "Time spent in engine steps"),
    ("computed_tokens", "stoker_computed_tokens", "Tokens that were run through the model"),
    ("partial_tokens", "stoker_partial_tokens", "Tokens reused out of blocks that differ towards their end"),
    ("preemptions", "stoker_preemptions", "Sequences put back to waiting for want of blocks"),
    ("loaded_tokens", "stoker_kv_loaded_tokens", "Tokens whose KV came from a tier"),
    ("pulled_tokens", "stoker_kv_pulled_tokens", "Tokens whose KV came from another worker"),
    ("failed_loads", "stoker_kv_failed_loads", "Loads that brought less than was asked for"),
)
# TierReport's field, our name after stoker_kv_tier_, help. What is not known yet is left out.
_TIER_GAUGES = (
    ("blocks", "blocks", "Blocks that the tier holds"),
    ("used_bytes", "used_bytes", "Bytes that the tier holds"),
    ("capacity_bytes", "capacity_bytes", "Bytes that the tier may hold"),
    ("bytes_per_s", "read_bytes_per_second", "Speed of reading, lately"),
    ("crossover_tokens", "crossover_tokens", "From so many tokens on, loading beats computing"),
)
_TIER_COUNTERS = (
    ("hits", "hits", "Blocks read and right"),
    ("misses", "misses", "Blocks asked for that were not there, or were wrong"),
    ("read_bytes", "read_bytes", "Bytes read"),
    ("written_bytes", "written_bytes", "Bytes written"),
    ("read_s", "read_seconds", "Time spent reading"),
    ("write_s", "write_seconds", "Time spent writing"),
    ("declined", "declined", "Blocks offered and not taken"),
    ("evicted", "evicted", "Blocks that made room for others"),
    ("corrupt", "corrupt", "Blocks found wrong, and dropped"),
    ("errors", "errors", "Calls that failed"),
)


class _EngineCollector(Collector):
    """The engine's last report, as it stands when somebody scrapes."""

    def __init__(self, stats: Callable[[], EngineStats | None], num_restarts: Callable[[], int]) -> None:
        self._stats = stats
        self._num_restarts = num_restarts

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("stoker_engine_restarts", "Restarts of the engine", value=self._num_restarts())
        stats = self._stats()
        if stats is None:
            return
        for field, name, text in _GAUGES:
            yield GaugeMetricFamily(name, text, value=getattr(stats, field))
        for field, name, text in _COUNTERS:
            yield CounterMetricFamily(name, text, value=getattr(stats, field))
        for kind, table in ((GaugeMetricFamily, _TIER_GAUGES), (CounterMetricFamily, _TIER_COUNTERS)):
            for field, name, text in table:
                yield _by_tier(kind(f"stoker_kv_tier_{name}", text, labels=["tier"]), field, stats.tiers)


def _by_tier(family: _Family, field: str, tiers: list[TierReport]) -> _Family:
    for tier in tiers:
        value = getattr(tier, field)
        if value is not None:
            family.add_metric([tier.name], value)
    return family


class FastHistogram(Collector):
    """For what is observed at every token: prometheus_client's own takes several times as long."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class WorkerMetrics:
    def __init__(
        self,
        model: str,
        stats: Callable[[], EngineStats | None],
        ready: Callable[[], bool],
        num_restarts: Callable[[], int],
        num_running: Callable[[], int],
    ) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("stoker_requests", "Requests ended", ["endpoint", "status"], registry=registry)
        self.prompt_tokens = Counter("stoker_prompt_tokens", "Prompt tokens of answered requests", registry=registry)
        self.cached_tokens = Counter("stoker_cached_tokens", "Prompt tokens found in the cache", registry=registry)
        self.generated_tokens = Counter("stoker_generated_tokens", "Tokens generated", registry=registry)
        self.ttft_s = Histogram(
            "stoker_ttft_seconds", "Request's arrival to its first token", buckets=_TTFT_S, registry=registry
        )
        self.itl_s = FastHistogram("stoker_itl_seconds", "Between two chunks of a choice", _ITL_S)
        registry.register(self.itl_s)
        self.e2e_s = Histogram(
            "stoker_e2e_seconds", "Request's arrival to its end", ["endpoint"], buckets=_E2E_S, registry=registry
        )
        Gauge("stoker_model_info", "The model that is served", ["model"], registry=registry).labels(model).set(1)
        self._call("stoker_engine_ready", "1 while the engine takes requests", lambda: float(ready()))
        self._call("stoker_running_requests", "HTTP requests being answered", lambda: float(num_running()))
        registry.register(_EngineCollector(stats, num_restarts))

    def _call(self, name: str, text: str, value: Callable[[], float]) -> None:
        Gauge(name, text, registry=self._registry).set_function(value)

    def render(self) -> bytes:
        return generate_latest(self._registry)

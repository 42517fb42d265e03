"""The worker's Prometheus metrics. They have their own registry, so that there is no global state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from stoker.base.histogram import Histogram
from stoker.proto.messages import EngineStats, TierReport
from stoker.proto.tier_metrics import TIER_LABEL, TIER_METRICS, TierMetric
from stoker.worker.draft_metrics import OutputDrafts, engine_draft_metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL_S = (0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600, 1800)

# Field of EngineStats, name of the metric, help.
_GAUGES = (
    ("waiting_sequences", "stoker_waiting_sequences", "Waiting sequences"),
    ("waiting_tokens", "stoker_waiting_tokens", "Tokens of waiting sequences that are not computed yet"),
    ("running_sequences", "stoker_running_sequences", "Running sequences"),
    ("free_blocks", "stoker_kv_blocks_free", "KV blocks that no sequence holds"),
    ("cached_blocks", "stoker_kv_blocks_cached", "KV blocks that a prefix can still hit"),
    ("num_blocks", "stoker_kv_blocks", "KV blocks in total"),
    ("loading_sequences", "stoker_kv_loading_sequences", "Sequences that wait for KV from a tier or another worker"),
    ("mixed_step_tokens", "stoker_mixed_step_tokens", "Token limit of the last step with both prefill and decode"),
    ("step_fixed_s", "stoker_step_fixed_seconds", "Fitted time of a step without its tokens"),
    ("step_token_s", "stoker_step_token_seconds", "Fitted time of one more token in a step"),
    ("step_row_s", "stoker_step_row_seconds", "Fitted time of one more row in a step, beyond its token"),
    ("held_leases", "stoker_kv_leases", "Sequences whose KV is kept for another worker"),
)
_COUNTERS = (
    ("steps", "stoker_steps", "Engine steps"),
    ("step_s", "stoker_step_seconds", "Time spent in engine steps"),
    ("computed_tokens", "stoker_computed_tokens", "Tokens that the model computed"),
    ("partial_tokens", "stoker_partial_tokens", "Tokens reused from blocks whose last tokens differ"),
    ("preemptions", "stoker_preemptions", "Preemptions for lack of KV blocks"),
    ("loaded_tokens", "stoker_kv_loaded_tokens", "Tokens whose KV came from a tier"),
    ("pulled_tokens", "stoker_kv_pulled_tokens", "Tokens whose KV came from another worker"),
    ("failed_loads", "stoker_kv_failed_loads", "Loads that returned fewer tokens than requested"),
    ("draft_step_s", "stoker_draft_step_seconds", "Time spent in decode-only steps with drafts"),
    ("undrafted_s", "stoker_draft_undrafted_seconds", "Estimated time without drafts for the tokens of these steps"),
)


# Field of PoolReport, name of the metric, help.
_LOCAL_POOLS = (
    (
        "free_blocks",
        "stoker_kv_local_blocks_free",
        "KV blocks of layers with a window or chunks that no sequence holds",
    ),
    ("cached_blocks", "stoker_kv_local_blocks_cached", "KV blocks of such layers that a prefix can still hit"),
    ("num_blocks", "stoker_kv_local_blocks", "KV blocks of such layers in total"),
)


class _EngineCollector(Collector):
    """Exports the last stats of the engine when the metrics are scraped."""

    def __init__(
        self, model: Callable[[], str], stats: Callable[[], EngineStats | None], num_restarts: Callable[[], int]
    ) -> None:
        self._model = model
        self._stats = stats
        self._num_restarts = num_restarts

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("stoker_engine_restarts", "Restarts of the engine", value=self._num_restarts())
        served = GaugeMetricFamily("stoker_model_info", "The served model", labels=["model"])
        served.add_metric([self._model()], 1)
        yield served
        stats = self._stats()
        if stats is None:
            return
        for field, name, text in _GAUGES:
            yield GaugeMetricFamily(name, text, value=getattr(stats, field))
        for field, name, text in _COUNTERS:
            yield CounterMetricFamily(name, text, value=getattr(stats, field))
        for field, name, text in _LOCAL_POOLS:
            family = GaugeMetricFamily(name, text, labels=["reach"])
            for pool in stats.local_pools:
                family.add_metric([pool.name], getattr(pool, field))
            yield family
        for metric in TIER_METRICS:
            yield _by_tier(metric, stats.tiers)
        yield from engine_draft_metrics(stats)


def _by_tier(metric: TierMetric, tiers: list[TierReport]) -> Metric:
    kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
    family = kind(metric.full_name, metric.help, labels=[TIER_LABEL])
    for tier in tiers:
        value = getattr(tier, metric.field)
        if value is not None:
            family.add_metric([tier.name], value)
    return family


class _HistogramCollector(Collector):
    """Exports our histograms, one per value of `label`. prometheus_client's own is too slow for a value per token."""

    def __init__(self, name: str, text: str, histograms: Mapping[str, Histogram], label: str | None = None) -> None:
        self._name = name
        self._text = text
        self._histograms = histograms
        self._label = label

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label] if self._label else [])
        for value, histogram in self._histograms.items():
            names = [*map(floatToGoString, histogram.bounds), "+Inf"]
            buckets = list(zip(names, histogram.cumulative(), strict=True))
            family.add_metric([value] if self._label else [], buckets, histogram.sum)
        yield family


class _UnknownFieldCollector(Collector):
    """Exports the counts of request fields that are not known. Their number is bounded (`UnknownFields`)."""

    def __init__(self, counts: Callable[[], Mapping[str, int]]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily("stoker_unknown_fields", "Request fields that are not known", labels=["field"])
        for name, count in self._counts().items():
            family.add_metric([name], count)
        yield family


class WorkerMetrics:
    def __init__(
        self,
        model: Callable[[], str],
        stats: Callable[[], EngineStats | None],
        ready: Callable[[], bool],
        num_restarts: Callable[[], int],
        num_running: Callable[[], int],
        unknown_fields: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("stoker_requests", "Finished requests", ["endpoint", "status"], registry=registry)
        self.prompt_tokens = Counter("stoker_prompt_tokens", "Prompt tokens of answered requests", registry=registry)
        self.cached_tokens = Counter("stoker_cached_tokens", "Prompt tokens found in the cache", registry=registry)
        self.generated_tokens = Counter("stoker_generated_tokens", "Tokens generated", registry=registry)
        self.output_drafts = OutputDrafts(registry)
        self.ttft_s, self.itl_s = Histogram(_TTFT_S), Histogram(_ITL_S)
        self._e2e_s: dict[str, Histogram] = {}  # by endpoint
        for collector in (
            _HistogramCollector(
                "stoker_ttft_seconds", "Time from the arrival of a request to its first token", {"": self.ttft_s}
            ),
            _HistogramCollector("stoker_itl_seconds", "Time between two chunks of a choice", {"": self.itl_s}),
            _HistogramCollector(
                "stoker_e2e_seconds", "Time from the arrival of a request to its end", self._e2e_s, "endpoint"
            ),
        ):
            registry.register(collector)
        self._call("stoker_engine_ready", "1 while the engine accepts requests", lambda: float(ready()))
        self._call("stoker_running_requests", "Running HTTP requests", lambda: float(num_running()))
        registry.register(_EngineCollector(model, stats, num_restarts))
        registry.register(_UnknownFieldCollector(unknown_fields))

    def e2e_s(self, endpoint: str) -> Histogram:
        """Return the histogram of the time from the arrival of a request to its end."""
        found = self._e2e_s.get(endpoint)
        if found is None:
            found = self._e2e_s[endpoint] = Histogram(_E2E_S)
        return found

    def _call(self, name: str, text: str, value: Callable[[], float]) -> None:
        Gauge(name, text, registry=self._registry).set_function(value)

    def render(self) -> bytes:
        return generate_latest(self._registry)

"""The gateway's Prometheus metrics. The request path only updates plain numbers; text is made when /metrics is read.

docs/metrics.md lists the names, and docs/observability.md explains the labels.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from stoker.base.histogram import Histogram
from stoker.gateway.records.usage_row import UsageRow

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_TTFT_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL_S = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1, 0.125, 0.15),
    *(0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0),
)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600, 1800)
_QUEUE_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)
_OWN_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1)

_MAX_UNCOUNTED = 500  # finished requests that may wait to be counted

Labels = tuple[tuple[str, str], ...]
Sample = tuple[Labels, float]


class GatewayMetrics:
    """All counters and histograms of a gateway; other components add gauges."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.prompt_tokens: defaultdict[str, int] = defaultdict(int)
        self.cached_tokens: defaultdict[str, int] = defaultdict(int)
        self.completion_tokens: defaultdict[str, int] = defaultdict(int)
        self.tier_tokens: defaultdict[str, int] = defaultdict(int)
        self.ttft_parts_s: defaultdict[str, float] = defaultdict(float)
        self.retries: defaultdict[str, int] = defaultdict(int)
        self.resumes: defaultdict[str, int] = defaultdict(int)
        self.moves: defaultdict[str, int] = defaultdict(int)
        self.handoffs: defaultdict[str, int] = defaultdict(int)
        self.refusals: defaultdict[str, int] = defaultdict(int)
        self.bad_requests: defaultdict[str, int] = defaultdict(int)
        self.wrong_usage: defaultdict[str, int] = defaultdict(int)
        self.dropped_fields: defaultdict[str, int] = defaultdict(int)
        self.upstream: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.ttft_s = Histogram(_TTFT_S)
        self.itl_s = Histogram(_ITL_S)
        self.e2e_s = Histogram(_E2E_S)
        self.queue_s = Histogram(_QUEUE_S)
        self.keys_s = Histogram(_OWN_S)
        self.route_s = Histogram(_OWN_S)
        self._fresh: list[UsageRow] = []
        self._gauges: list[tuple[str, str, str, Callable[[], Iterable[Sample]]]] = []

    def ended(self, row: UsageRow) -> None:
        """Add a finished generating request. It is counted later, in a batch."""
        self._fresh.append(row)
        if len(self._fresh) >= _MAX_UNCOUNTED:
            self.count()

    def gauge(self, name: str, text: str, read: Callable[[], float], *, kind: str = "gauge") -> None:
        """Add a metric whose value is read from its owner when /metrics is read."""
        self._gauges.append((name, text, kind, lambda: [((), read())]))

    def gauges(self, name: str, text: str, read: Callable[[], Iterable[Sample]], *, kind: str = "gauge") -> None:
        self._gauges.append((name, text, kind, read))

    def render(self) -> bytes:
        self.count()
        return "\n".join([*self._lines(), ""]).encode()

    def count(self) -> None:
        """Count the requests that ended since the last call."""
        rows, self._fresh = self._fresh, []
        self.requests.update([(row.endpoint, row.status) for row in rows])
        # A refused request's model name comes from the client. Labels from it would be unbounded, so it is not counted.
        served = [row for row in rows if row.worker]
        for row in served:
            model = row.model
            self.prompt_tokens[model] += row.prompt_tokens
            self.cached_tokens[model] += row.cached_tokens
            self.completion_tokens[model] += row.completion_tokens
        self.e2e_s.observe_all([row.e2e_ms * 1e-3 for row in served])
        self.queue_s.observe_all([row.queued_ms * 1e-3 for row in served])
        self.ttft_s.observe_all([row.ttft_ms * 1e-3 for row in served if row.ttft_ms is not None])

    def _lines(self) -> Iterator[str]:
        requests = {(("endpoint", e), ("status", str(s))): float(n) for (e, s), n in self.requests.items()}
        yield from _family(
            "stoker_gateway_requests_total", "Generating requests that ended", "counter", requests.items()
        )
        for name, text, label, counts in (
            ("prompt_tokens", "Prompt tokens of served requests", "model", self.prompt_tokens),
            ("cached_tokens", "Prompt tokens of served requests that were found in cache", "model", self.cached_tokens),
            ("completion_tokens", "Tokens generated", "model", self.completion_tokens),
            ("cached_tier_tokens", "Cached prompt tokens by the tier that held them", "tier", self.tier_tokens),
            ("ttft_part_seconds", "Time to the first byte of streams by its parts", "part", self.ttft_parts_s),
            ("retries", "Requests sent to another worker before the first byte", "reason", self.retries),
            ("moves", "Running requests that a draining worker handed to another one", "outcome", self.moves),
            ("resumes", "Broken streams continued, or not, by another worker", "outcome", self.resumes),
            ("handoffs", "Requests with a prefill and a decode leg", "outcome", self.handoffs),
            ("refusals", "Requests refused before admission", "code", self.refusals),
            ("wrong_usage", "Answers whose worker reported impossible token counts", "worker", self.wrong_usage),
            ("dropped_fields", "Body fields not passed to a foreign engine", "field", self.dropped_fields),
            ("bad_requests", "Requests that are not valid HTTP", "reason", self.bad_requests),
        ):
            yield from _family(f"stoker_gateway_{name}_total", text, "counter", _labelled(label, counts))
        upstream = {(("worker", w), ("kind", k)): float(n) for (w, k), n in self.upstream.items()}
        yield from _family(
            "stoker_gateway_worker_failures_total", "Failed requests to workers", "counter", upstream.items()
        )
        for name, text, histogram in (
            ("ttft", "Time from a request's arrival to the first byte of its answer", self.ttft_s),
            ("itl", "Time between two pieces of a stream", self.itl_s),
            ("e2e", "Time from a request's arrival to its end", self.e2e_s),
            ("queue", "Time a request waited for admission", self.queue_s),
            ("keys", "Time to compute a conversation's prefix keys", self.keys_s),
            ("route", "Time to choose a worker", self.route_s),
        ):
            yield from _histogram(f"stoker_gateway_{name}_seconds", text, histogram)
        for name, text, kind, read in self._gauges:
            yield from _family(name, text, kind, read())


def _labelled(label: str, counts: Mapping[str, float]) -> Iterator[Sample]:
    return ((((label, value),), float(count)) for value, count in counts.items())


def _head(name: str, text: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def _family(name: str, text: str, kind: str, samples: Iterable[Sample]) -> Iterator[str]:
    yield from _head(name, text, kind)
    for labels, value in samples:
        inside = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels)
        yield f"{name}{{{inside}}} {_number(value)}" if inside else f"{name} {_number(value)}"


def _histogram(name: str, text: str, histogram: Histogram) -> Iterator[str]:
    yield from _head(name, text, "histogram")
    counts = histogram.cumulative()
    for bound, count in zip([*map(_number, histogram.bounds), "+Inf"], counts, strict=True):
        yield f'{name}_bucket{{le="{bound}"}} {count}'
    yield f"{name}_sum {_number(histogram.sum)}"
    yield f"{name}_count {counts[-1]}"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))

"""InsightBook: collects the requests that end, and every second turns them and the metrics into a row of the series.

The request path only appends to a list. The rest happens in `tick`, once per second, or when many requests have ended. It does
no I/O, and all of it is bounded in memory.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import msgspec

from stoker.gateway.admission.prices import PriceList
from stoker.gateway.insight.bottleneck import bottleneck
from stoker.gateway.insight.canary_watch import CanaryWatch
from stoker.gateway.insight.latency_goals import LatencyGoals
from stoker.gateway.insight.request_digest import RequestDigest, RequestTimes, digest_of
from stoker.gateway.insight.reuse_curve import ReuseCurve
from stoker.gateway.insight.series_columns import TIERS, TOTALS, TTFT_PARTS, SeriesColumns
from stoker.gateway.insight.series_rings import SeriesBook
from stoker.gateway.insight.series_rows import SeriesRows
from stoker.gateway.insight.session_book import SessionBook
from stoker.gateway.records.metrics import GatewayMetrics
from stoker.gateway.records.usage_row import UsageRow
from stoker.proto.admin_api import NowAnswer, SeriesAnswer
from stoker.routing.query import Route, RouteQuery

_MAX_PENDING = 256  # ended requests that wait for the next tick
_MAX_REQUESTS = 1000  # kept for the page of requests
_NOW_S = 60  # what the page Now is about
_EVICTED = re.compile(r"\bevicted(?:\[[^\]]*\])?=(\d+)")
_UNIT = 1e-12  # of the currency, see `prices.py`
_SERVER_ERROR = 500

_Pending = tuple[UsageRow, Route | None, RouteQuery | None, RequestTimes, int, list[int]]


class InsightBook:
    """Everything that the dashboard shows about requests. `read_gauges` returns the gauges in the order of GAUGES."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        prices: PriceList,
        goals: LatencyGoals,
        read_gauges: Callable[[], Sequence[float]],
        canaries: CanaryWatch,
        *,
        currency: str = "USD",
        has_prices: bool = False,
        process: int = 0,
    ) -> None:
        self._metrics = metrics
        self._prices = prices
        self._goals = goals
        self._read_gauges = read_gauges
        self.canaries = canaries
        self._currency = currency
        self._has_prices = has_prices
        self._process = process
        self._columns = SeriesColumns(metrics.ttft_s.bounds, metrics.itl_s.bounds)
        self._series = SeriesBook(self._columns.num_totals, self._columns.num_gauges)
        self._pending: list[_Pending] = []
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._requests: deque[RequestDigest] = deque(maxlen=_MAX_REQUESTS)
        self.sessions = SessionBook()
        self.reuse = ReuseCurve()
        self._time_s = 0.0

    # ---- what happens

    def ended(
        self, row: UsageRow, route: Route | None, query: RouteQuery | None, times: RequestTimes, num_retries: int
    ) -> None:
        """Take a request that has ended."""
        sampled = [] if query is None else self.reuse.sample(query.keys)
        self._pending.append((row, route, query, times, num_retries, sampled))
        if len(self._pending) >= _MAX_PENDING:
            self._count()

    def tick(self, time_s: float) -> None:
        """Store one row of the series. Call it once per second, with the Unix time."""
        self._count()
        self.canaries.judge()
        self._time_s = time_s
        metrics, sums = self._metrics, self._sums
        metrics.count()
        sums["refused"] = sum(metrics.refusals.values())
        totals = [float(sums[name]) for name in TOTALS]
        totals += metrics.ttft_s.cumulative()
        totals += metrics.itl_s.cumulative()
        self._series.tick(time_s, totals, self._read_gauges())

    def _count(self) -> None:
        pending, self._pending = self._pending, []
        goals, metrics, sums = self._goals, self._metrics, self._sums
        for row, route, query, times, num_retries, sampled in pending:
            price = self._prices.price(row.model)
            ended = digest_of(
                row,
                route,
                query,
                times,
                num_retries,
                price,
                ttft_goal_ms=goals.ttft_ms,
                itl_goal_ms=goals.itl_ms,
            )
            self._requests.append(ended)
            self.sessions.add(ended)
            if sampled and query is not None:
                self.reuse.use(sampled, query.block_tokens, times.arrived_s)
            sums["requests"] += 1
            sums["failed"] += row.status >= _SERVER_ERROR and row.worker != ""
            sums["good"] += ended.is_good
            if not row.worker:
                continue
            sums["prompt_tokens"] += row.prompt_tokens
            sums["cached_tokens"] += row.cached_tokens
            sums["completion_tokens"] += row.completion_tokens
            sums["cost"] += ended.cost * _UNIT
            sums["saved"] += ended.saved * _UNIT
            sums["saved_prefill_s"] += ended.saved_prefill_s
            if "evicted" in row.misses:
                sums["evicted_tokens"] += sum(map(int, _EVICTED.findall(row.misses)))
            for tier, tokens in zip(TIERS, ended.tier_tokens, strict=True):
                if tokens:
                    metrics.tier_tokens[tier] += tokens
                    sums[f"{tier}_tokens"] += tokens
            if ended.parts_ms:
                sums["streams"] += 1
                for part, part_ms in zip(TTFT_PARTS, ended.parts_ms, strict=True):
                    metrics.ttft_parts_s[part] += part_ms * 1e-3
                    sums[f"{part}_s"] += part_ms * 1e-3

    # ---- what is shown

    @property
    def steps_s(self) -> list[int]:
        return self._series.steps_s

    def max_points(self, step_s: int) -> int:
        return self._series.ring(step_s).num_points

    def series_rows(self, step_s: int, count: int) -> SeriesRows:
        """Return the latest points of a resolution. The last one is still growing, unless its step is a second."""
        points = self._series.ring(step_s).window(self._time_s, count)
        return SeriesRows(
            time_s=self._time_s,
            step_s=step_s,
            times_s=[start for start, _ in points],
            rows=[None if row is None else list(row) for _, row in points],
        )

    def now_rows(self) -> SeriesRows:
        """Return two rows: the sum of the last minute, and the last second."""
        total = self._series.ring(1).total(self._time_s, _NOW_S)
        latest = self.series_rows(1, 1)
        return msgspec.structs.replace(latest, times_s=latest.times_s * 2, rows=[total, *latest.rows])

    def show_series(self, parts: Sequence[SeriesRows]) -> SeriesAnswer:
        """Return what is shown of the rows of one or several processes. The times are those of the first."""
        columns = self._columns.columns(self._joined(parts), parts[0].step_s)
        return SeriesAnswer(step_s=parts[0].step_s, times_s=parts[0].times_s, columns=columns)

    def show_now(self, parts: Sequence[SeriesRows]) -> NowAnswer:
        """Return the last minute from the `now_rows` of one or several processes."""
        minute, point = self._joined(parts)
        values = self._columns.values(minute, _NOW_S)
        return NowAnswer(
            time_s=parts[0].time_s,
            bottleneck=bottleneck(values, self._goals),
            values=values,
            point=self._columns.values(point, 1),
            currency=self._currency,
            has_prices=self._has_prices,
            ttft_goal_ms=self._goals.ttft_ms,
            itl_goal_ms=self._goals.itl_ms,
            process=self._process,
        )

    def _joined(self, parts: Sequence[SeriesRows]) -> list[list[float] | None]:
        if len(parts) == 1:
            return parts[0].rows
        return [self._columns.joined(rows) for rows in zip(*(part.rows for part in parts), strict=True)]

    def series(self, step_s: int, count: int) -> SeriesAnswer:
        """Return the latest points of this process."""
        return self.show_series([self.series_rows(step_s, count)])

    def now(self) -> NowAnswer:
        """Return the last minute of this process."""
        return self.show_now([self.now_rows()])

    def requests(self, count: int) -> list[RequestDigest]:
        """Return the latest requests, the latest first."""
        self._count()
        latest = list(self._requests)[-count:] if count > 0 else []
        return latest[::-1]

    def request(self, name: str) -> RequestDigest | None:
        """Return the latest request with this id, the gateway's own or the client's."""
        self._count()
        return next(
            (one for one in reversed(self._requests) if name in (one.row.request_id, one.row.x_request_id)), None
        )

"""What a row of the series holds, and the values that are shown from it. Pure.

A row has three parts: the growth of totals, the gauges, and the number of ticks (`series_rings.py`). The totals end with two
cumulative histograms: the time to the first token and the time between tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker.gateway.insight.series_rings import quantile

TIERS = ("device", "host", "disk")
# The parts of the time to the first byte: the gateway's queue and own work, the worker's queue, prefill, the hand-off.
TTFT_PARTS = ("queue", "gateway", "worker_wait", "prefill", "transfer")

TOTALS = (
    "requests",
    "failed",
    "refused",
    "good",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    *(f"{tier}_tokens" for tier in TIERS),
    "streams",  # streams that had a first token, for the mean of its parts
    *(f"{part}_s" for part in TTFT_PARTS),
    "cost",
    "saved",
    "saved_prefill_s",
    "evicted_tokens",
)
GAUGES = (
    "running_requests",
    "waiting_requests",
    "workers",
    "usable_workers",
    "kv_used",
    "kv_used_max",
    "backlog_tokens",
    "backlog_s",
    "context_tokens",
    "running_sequences",
)
# The gauges that count only the requests of one process.
_OWN_GAUGES = frozenset({"running_requests", "waiting_requests", "backlog_tokens", "backlog_s", "context_tokens"})


class SeriesColumns:
    """Names the numbers of a row. `ttft_bounds_s` and `itl_bounds_s` are the buckets of the histograms."""

    def __init__(self, ttft_bounds_s: Sequence[float], itl_bounds_s: Sequence[float]) -> None:
        self._ttft_bounds_s = ttft_bounds_s
        self._itl_bounds_s = itl_bounds_s
        self._ttft_at = len(TOTALS)
        self._itl_at = self._ttft_at + len(ttft_bounds_s) + 1
        self.num_totals = self._itl_at + len(itl_bounds_s) + 1
        self.num_gauges = len(GAUGES)

    def joined(self, rows: Sequence[Sequence[float] | None]) -> list[float] | None:
        """Join the rows that the processes of a gateway have of one time.

        Totals are added, and so are the gauges of a process's own requests. All processes see the same workers: of those
        gauges it is the mean.
        """
        known = [row for row in rows if row is not None and row[-1]]
        if not known:
            return None
        totals = [sum(values) for values in zip(*(row[: self.num_totals] for row in known), strict=True)]
        gauges = []
        for at, name in enumerate(GAUGES, self.num_totals):
            whole = sum(row[at] / row[-1] for row in known)
            gauges.append(whole if name in _OWN_GAUGES else whole / len(known))
        return [*totals, *gauges, 1.0]

    def values(self, row: Sequence[float] | None, seconds: float) -> dict[str, float | None]:
        """Return what is shown of a row that covers this time. None for all values: the row is missing."""
        if row is None:
            return dict.fromkeys(_SHOWN)
        sums = dict(zip(TOTALS, row, strict=False))
        ticks = row[-1]
        gauges = row[self.num_totals : self.num_totals + self.num_gauges]
        ttft = row[self._ttft_at : self._itl_at]
        itl = row[self._itl_at : self.num_totals]
        shown: dict[str, float | None] = {
            "requests_per_s": sums["requests"] / seconds,
            "failed_per_s": sums["failed"] / seconds,
            "refused_per_s": sums["refused"] / seconds,
            "goodput_per_s": sums["good"] / seconds,
            "prompt_tokens_per_s": sums["prompt_tokens"] / seconds,
            "completion_tokens_per_s": sums["completion_tokens"] / seconds,
            "evicted_tokens_per_s": sums["evicted_tokens"] / seconds,
            "hit_ratio": _ratio(sums["cached_tokens"], sums["prompt_tokens"]),
            "cost": sums["cost"],
            "saved": sums["saved"],
            "saved_prefill_s": sums["saved_prefill_s"],
        }
        for tier in TIERS:
            shown[f"cached_{tier}_tokens_per_s"] = sums[f"{tier}_tokens"] / seconds
        for part in TTFT_PARTS:
            shown[f"ttft_{part}_ms"] = _ratio(1e3 * sums[f"{part}_s"], sums["streams"])
        for name, bounds, counts in (("ttft", self._ttft_bounds_s, ttft), ("itl", self._itl_bounds_s, itl)):
            for percent in (50, 95):
                found = quantile(bounds, counts, percent / 100)
                shown[f"{name}_p{percent}_ms"] = None if found is None else 1e3 * found
        shown |= {name: _ratio(value, ticks) for name, value in zip(GAUGES, gauges, strict=True)}
        return {name: None if value is None else _rounded(value) for name, value in shown.items()}

    def columns(self, rows: Sequence[Sequence[float] | None], step_s: float) -> dict[str, list[float | None]]:
        """Return the values of many rows, by name."""
        shown = [self.values(row, step_s) for row in rows]
        return {name: [one[name] for one in shown] for name in _SHOWN}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _rounded(value: float) -> float:
    """Keep five significant digits, which is what a plot needs, and less to send."""
    return float(f"{value:.5g}")


_SHOWN = (
    "requests_per_s",
    "failed_per_s",
    "refused_per_s",
    "goodput_per_s",
    "prompt_tokens_per_s",
    "completion_tokens_per_s",
    "evicted_tokens_per_s",
    "hit_ratio",
    "cost",
    "saved",
    "saved_prefill_s",
    *(f"cached_{tier}_tokens_per_s" for tier in TIERS),
    *(f"ttft_{part}_ms" for part in TTFT_PARTS),
    "ttft_p50_ms",
    "ttft_p95_ms",
    "itl_p50_ms",
    "itl_p95_ms",
    *GAUGES,
)

"""Summarizes the records of a run: rates, percentiles and errors. Needs no terminal library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stoker.loadgen.stream import Record


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of many samples."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """The results of a run. Rates are over the time from the first request sent to the last one ended. Failed requests
    count only as errors.
    """

    duration_s: float
    requests: int  # answered completely
    failed: int
    errors: dict[str, int]  # by kind
    peak_concurrency: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int | None  # None: the server does not report them
    hit_ratio: float | None
    output_tokens: int
    tokens_per_chunk: float | None  # above 1: a gap between chunks is not a gap between tokens
    without_usage: int  # answers without usage; their chunks are counted as tokens
    ttft_ms: Spread | None
    itl_ms: Spread | None
    tpot_ms: Spread | None
    e2e_ms: Spread | None


def quantile(ordered: Sequence[float], share: float) -> float:
    """Interpolate linearly between the two nearest samples."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread_ms(samples_s: Iterable[float]) -> Spread | None:
    ordered = sorted(sample * 1e3 for sample in samples_s)
    if not ordered:
        return None
    return Spread(
        count=len(ordered),
        mean=sum(ordered) / len(ordered),
        p50=quantile(ordered, 0.50),
        p90=quantile(ordered, 0.90),
        p95=quantile(ordered, 0.95),
        p99=quantile(ordered, 0.99),
        max=ordered[-1],
    )


def peak_concurrency(records: Sequence[Record]) -> int:
    # At equal times an end comes before a start: a slot that was reused is one running request, not two.
    moments = sorted([(record.started_s, 1) for record in records] + [(record.ended_s, -1) for record in records])
    running = peak = 0
    for _, change in moments:
        running += change
        peak = max(peak, running)
    return peak


def summarize(records: Sequence[Record]) -> LoadSummary:
    good = [record for record in records if record.error is None]
    errors = Counter(record.error for record in records if record.error is not None)
    duration_s = max((r.ended_s for r in records), default=0.0) - min((r.started_s for r in records), default=0.0)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    prompt_tokens = sum(record.prompt_tokens for record in good)
    output_tokens = sum(record.completion_tokens for record in good)
    reported = [record for record in good if record.cached_tokens is not None]
    cached_tokens = sum(record.cached_tokens or 0 for record in reported) if reported else None
    reported_prompt = sum(record.prompt_tokens for record in reported)
    num_chunks = sum(record.num_chunks for record in good)
    return LoadSummary(
        duration_s=duration_s,
        requests=len(good),
        failed=len(records) - len(good),
        errors=dict(sorted(errors.items())),
        peak_concurrency=peak_concurrency(records),
        requests_per_s=len(good) * per_s,
        input_tokens_per_s=prompt_tokens * per_s,
        output_tokens_per_s=output_tokens * per_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) * per_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        hit_ratio=(cached_tokens or 0) / reported_prompt if reported_prompt else None,
        output_tokens=output_tokens,
        tokens_per_chunk=output_tokens / num_chunks if num_chunks else None,
        without_usage=sum(not record.has_usage for record in good),
        ttft_ms=spread_ms(record.ttft_s for record in good if record.ttft_s is not None),
        itl_ms=spread_ms(gap_s for record in good for gap_s in record.gaps_s),
        tpot_ms=spread_ms(record.tpot_s for record in good if record.tpot_s is not None),
        e2e_ms=spread_ms(record.e2e_s for record in good),
    )

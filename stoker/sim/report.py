"""The report of a prediction: a readable table, JSON, and plots as SVG in one HTML page."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence

from stoker.sim.summary import PERCENTILES, Prediction, quantile

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 300, 60, 40
_COLORS = ("#0b6e99", "#c05621", "#2f855a", "#805ad5")
_TIMES = (("TTFT", "ttft_ms"), ("between tokens", "itl_ms"), ("end to end", "e2e_ms"))
_MAX_POINTS = 400
_MAX_WORKERS = 16  # that are listed one by one


def table(prediction: Prediction) -> str:
    """Return the results as text, with the range of each predicted time."""
    one, config = prediction.summary, prediction.outcome.config
    calibration = config.calibration
    rows = [("", *(f"p{share * 100:g}" for share in PERCENTILES), "mean")]
    for title, name in _TIMES:
        times = getattr(one, name)
        fields = [f"p{share * 100:g}" for share in PERCENTILES]
        rows.append((f"{title}, ms", *(_with_range(prediction, name, field) for field in fields), _number(times.mean)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        f"{calibration.model} on {calibration.device} ({calibration.kind}), "
        f"{config.fleet.unified} unified, {config.fleet.prefill} prefill and {config.fleet.decode} decode workers",
        "",
    ]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    outcomes = ", ".join(f"{count} {name}" for name, count in one.outcomes.items())
    hits = ", ".join(f"{name} {share:.1%}" for name, share in one.hits_by_tier.items())
    busy = list(one.utilisation.values())
    shown = (
        ", ".join(f"{name} {share:.0%}" for name, share in one.utilisation.items()) if len(busy) <= _MAX_WORKERS else ""
    )
    lines += [
        "",
        f"requests          {one.requests} ({outcomes}) in {one.duration_s:.1f} s",
        f"throughput        {one.requests_per_s:.2f} requests/s, {one.output_tokens_per_s:.1f} output tokens/s",
        f"goodput           {one.goodput_per_s:.2f} requests/s within the goal",
        f"cached            {one.hit_ratio:.1%} of {one.prompt_tokens} prompt tokens ({hits})",
        f"utilisation       {sum(busy) / len(busy):.0%} on average, {max(busy):.0%} at most{': ' + shown if shown else ''}",
        f"preemptions       {one.preemptions}",
        f"GPU-hours         {one.gpu_hours:.3f}",
    ]
    if one.cost_per_million_tokens is not None:
        lines.append(f"cost              {one.cost_per_million_tokens:.4f} per million tokens")
    residuals = calibration.residuals
    lines.append(
        f"calibration       median error of a step {residuals.median:.1%}, p90 {residuals.p90:.1%}; the ranges are for steps "
        f"that take {residuals.range_share:.0%} less or more"
    )
    return "\n".join([*lines, *(f"warning: {text}" for text in prediction.warnings)])


def as_json(prediction: Prediction, workload: dict[str, object]) -> str:
    """Return the results as JSON. The same input gives the same bytes."""
    return json.dumps({"workload": workload, **prediction.as_dict()}, indent=1, sort_keys=True)


def as_html(prediction: Prediction, workload: dict[str, object]) -> str:
    """Return one page without scripts or links: the table and the plots."""
    records = prediction.outcome.records
    good = list(records.answered())
    ttft = sorted(records.ttft_s[i] * 1e3 for i in good)
    e2e = sorted(records.ended_s[i] - records.started_s[i] for i in good)
    arrivals = sorted((records.started_s[i], records.ttft_s[i] * 1e3) for i in good)
    plots = [
        svg_plot("Time to first token", "ms", "share of requests", {"TTFT": _distribution(ttft)}),
        svg_plot("End to end", "s", "share of requests", {"end to end": _distribution(e2e)}),
        svg_plot("Time to first token over the run", "s", "ms", {"TTFT": _thinned(arrivals)}, dots=True),
    ]
    described = "\n".join(f"{name}: {value}" for name, value in workload.items() if value is not None)
    text = html.escape(f"{described}\n\n{table(prediction)}")
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>stoker sim</title>\n'
        "<style>body{font-family:sans-serif;max-width:60rem;margin:2rem auto}pre{overflow-x:auto}</style>\n"
        f"<h1>Predicted by stoker sim</h1>\n<pre>{text}</pre>\n" + "\n".join(plots) + "\n</html>\n"
    )


def svg_plot(
    title: str, x_name: str, y_name: str, series: dict[str, Sequence[tuple[float, float]]], *, dots: bool = False
) -> str:
    """Return a plot of lines, or of dots, as an SVG element."""
    points = [point for line in series.values() for point in line]
    x_max = max((x for x, _ in points), default=1.0) or 1.0
    y_max = max((y for _, y in points), default=1.0) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img">',
        f'<text x="{_LEFT}" y="18" font-size="14">{html.escape(title)}</text>',
        f'<path d="M{_LEFT} 30V{_HEIGHT - _BOTTOM}H{_WIDTH - 10}" stroke="#444" fill="none"/>',
        f'<text x="{_WIDTH - 10}" y="{_HEIGHT - 8}" font-size="11" text-anchor="end">{html.escape(x_name)}</text>',
        f'<text x="4" y="30" font-size="11">{html.escape(y_name)}</text>',
    ]
    for step in range(5):
        x, y = _place(x_max * step / 4, y_max * step / 4, x_max, y_max)
        parts.append(
            f'<text x="{x:.1f}" y="{_HEIGHT - 24}" font-size="10" text-anchor="middle">{x_max * step / 4:.4g}</text>'
        )
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 3:.1f}" font-size="10" text-anchor="end">{y_max * step / 4:.3g}</text>'
        )
    for number, (name, line) in enumerate(series.items()):
        color = _COLORS[number % len(_COLORS)]
        places = [_place(x, y, x_max, y_max) for x, y in line]
        if dots:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.6" fill="{color}"/>' for x, y in places]
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{path}" stroke="{color}" fill="none" stroke-width="2"/>')
        if len(series) > 1:
            parts.append(f'<text x="{_WIDTH - 140}" y="{48 + 16 * number}" fill="{color}">{html.escape(name)}</text>')
    return "\n".join([*parts, "</svg>"])


def _place(x: float, y: float, x_max: float, y_max: float) -> tuple[float, float]:
    width, height = _WIDTH - 10 - _LEFT, _HEIGHT - _BOTTOM - 30
    return _LEFT + width * x / x_max, _HEIGHT - _BOTTOM - height * y / y_max


def _distribution(ordered: Sequence[float]) -> list[tuple[float, float]]:
    if not ordered:
        return []
    return [(quantile(ordered, i / 100), i / 100) for i in range(101)]


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    return points[:: max(1, len(points) // _MAX_POINTS)]


def _with_range(prediction: Prediction, name: str, field: str) -> str:
    value = getattr(getattr(prediction.summary, name), field)
    ends = prediction.range_of(name, field)
    return _number(value) if ends is None else f"{_number(value)} ({_number(ends[0])} to {_number(ends[1])})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"

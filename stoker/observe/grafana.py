"""A Grafana dashboard: an overview that is written by hand, then one panel for each metric that the code exports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from stoker.observe.metric_catalog import MetricFamily, check_expressions

_WIDTH, _HEIGHT = 8, 7  # of a panel, in units of Grafana's grid, which is 24 wide
_PER_ROW = 24 // _WIDTH
_GATEWAY = "stoker_gateway_"


@dataclass(frozen=True, slots=True)
class OverviewPanel:
    """One panel of the overview: `lines` are pairs of an expression and a legend."""

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]


def _quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket[$__rate_interval])))", f"p{round(100 * q)}")
        for q in (0.5, 0.9, 0.99)
    )


OVERVIEW = (
    OverviewPanel("Time to first token", "s", _quantiles("stoker_gateway_ttft_seconds")),
    OverviewPanel("Time between tokens (workers)", "s", _quantiles("stoker_itl_seconds")),
    OverviewPanel(
        "Requests",
        "reqps",
        (("sum by (status) (rate(stoker_gateway_requests_total[$__rate_interval]))", "{{status}}"),),
    ),
    OverviewPanel(
        "Cache hit ratio",
        "percentunit",
        (
            (
                "sum(rate(stoker_gateway_cached_tokens_total[$__rate_interval]))"
                " / sum(rate(stoker_gateway_prompt_tokens_total[$__rate_interval]))",
                "cached / prompt tokens",
            ),
        ),
    ),
    OverviewPanel(
        "Tokens",
        "tokens/s",
        (
            (
                "sum(rate(stoker_gateway_prompt_tokens_total[$__rate_interval]))"
                " - sum(rate(stoker_gateway_cached_tokens_total[$__rate_interval]))",
                "prompt, computed",
            ),
            ("sum(rate(stoker_gateway_cached_tokens_total[$__rate_interval]))", "prompt, cached"),
            ("sum(rate(stoker_gateway_completion_tokens_total[$__rate_interval]))", "completion"),
        ),
    ),
    OverviewPanel(
        "Running and waiting requests",
        "short",
        (("sum(stoker_gateway_running_requests)", "running"), ("sum(stoker_gateway_waiting_requests)", "waiting")),
    ),
    OverviewPanel("KV memory in use", "percentunit", (("stoker_gateway_worker_kv_used", "{{worker}}"),)),
    OverviewPanel("Prefill tokens in flight", "short", (("stoker_gateway_worker_prefill_tokens", "{{worker}}"),)),
    OverviewPanel(
        "Retries, resumes, worker failures",
        "ops",
        (
            ("sum(rate(stoker_gateway_retries_total[$__rate_interval]))", "retries"),
            ("sum(rate(stoker_gateway_resumes_total[$__rate_interval]))", "resumes"),
            ("sum(rate(stoker_gateway_worker_failures_total[$__rate_interval]))", "worker failures"),
        ),
    ),
)


def dashboard(families: Sequence[MetricFamily]) -> str:
    """Return the dashboard as JSON text. Raises ConfigError if the overview uses a metric that does not exist."""
    check_expressions((expr for panel in OVERVIEW for expr, _ in panel.lines), families)
    ids = count(1)
    sections = (
        ("Overview", OVERVIEW, False),
        ("Gateway: all metrics", [_panel_of(one) for one in families if one.name.startswith(_GATEWAY)], True),
        ("Workers: all metrics", [_panel_of(one) for one in families if not one.name.startswith(_GATEWAY)], True),
    )
    panels: list[dict[str, Any]] = []
    y = 0
    for title, members, collapsed in sections:
        placed = list(_placed(members, y + 1, ids))
        row = {"id": next(ids), "type": "row", "title": title, "gridPos": _grid(0, y, 24, 1), "collapsed": collapsed}
        panels += [{**row, "panels": placed}] if collapsed else [{**row, "panels": []}, *placed]
        y += 1 + (0 if collapsed else _HEIGHT * -(-len(members) // _PER_ROW))
    page = {
        "uid": "stoker",
        "title": "Stoker",
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
    }
    # One line for each panel, so that a changed metric is one changed line.
    lines = ",\n".join(json.dumps(panel) for panel in panels)
    return f'{json.dumps(page)[:-1]}, "panels": [\n{lines}\n]}}\n'


def _panel_of(family: MetricFamily) -> OverviewPanel:
    unit = "s" if family.name.removesuffix("_total").endswith("_seconds") else "short"
    unit = "bytes" if family.name.removesuffix("_total").endswith("_bytes") else unit
    if family.kind == "histogram":
        return OverviewPanel(family.help, unit, _quantiles(family.name))
    expression = f"rate({family.name}[$__rate_interval])" if family.kind == "counter" else family.name
    return OverviewPanel(family.help, unit, ((expression, ""),))


def _placed(panels: Iterable[OverviewPanel], top: int, ids: Iterator[int]) -> Iterator[dict[str, Any]]:
    source = {"type": "prometheus", "uid": "${source}"}
    for i, panel in enumerate(panels):
        yield {
            "id": next(ids),
            "type": "timeseries",
            "title": panel.title,
            "datasource": source,
            "gridPos": _grid(i % _PER_ROW * _WIDTH, top + i // _PER_ROW * _HEIGHT, _WIDTH, _HEIGHT),
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
            "targets": [
                {"refId": chr(ord("A") + n), "datasource": source, "expr": expr, "legendFormat": legend or "__auto"}
                for n, (expr, legend) in enumerate(panel.lines)
            ],
        }


def _grid(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}

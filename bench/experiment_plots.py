"""Plots of the benchmark `sim_experiments`: bars in groups, one group for each size, load or store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.drawing import Drawing
from bench.results import SavedRecord

_BENCHMARK = "sim_experiments"
_KINDS = ("other", "two", "one")


def _bars(records: Sequence[SavedRecord], title: str, subtitle: str, strong: Callable[[str], int]) -> str:
    """Draw a bar for each record. A case is `experiment, group: label`; `strong` chooses a label's color."""
    left, right, top, row = 330, 690, 76, 22
    groups: dict[str, list[tuple[str, float]]] = {}
    for record in records:
        group, _, label = record.case.partition(": ")
        groups.setdefault(group.partition(", ")[2], []).append((label, record.value))
    most = max(record.value for record in records) * 1.12
    drawing = Drawing(760, top + sum(34 + row * len(rows) for rows in groups.values()) + 10, title, subtitle)
    y = top
    for group, rows in groups.items():
        drawing.text(24, y + 12, group)
        y += 22
        for label, value in rows:
            drawing.text(left - 10, y + 14, label, "soft", "end")
            width = (right - left) * value / most
            drawing.bar(left, y + 3, width, 15, _KINDS[strong(label)])
            drawing.text(left + width + 6, y + 15, f"{value:.3g}", "soft")
            y += row
        y += 12
    return drawing.svg()


def _select(by_benchmark: dict[str, list[SavedRecord]], experiment: str, metric: str) -> list[SavedRecord]:
    return [
        record
        for record in by_benchmark[_BENCHMARK]
        if record.case.startswith(f"{experiment}, ") and record.metric == metric
    ]


def sim_headers(by_benchmark: dict[str, list[SavedRecord]]) -> str:
    records = _select(by_benchmark, "headers", "token hit ratio")
    subtitle = "Cached share of the prompt tokens in %, simulated, no shared store. Longer is better."
    return _bars(records, "Session headers", subtitle, lambda label: 2 if "cost" in label else int("no" not in label))


def sim_disaggregation(by_benchmark: dict[str, list[SavedRecord]]) -> str:
    records = _select(by_benchmark, "disaggregation", "time between tokens, p90")
    subtitle = "p90 of the time between tokens in ms, simulated, 64 GPUs in every layout. Shorter is better."
    return _bars(records, "Prefill and decode on the same GPUs", subtitle, lambda label: 2 * ("decode" in label))


def sim_shared_store(by_benchmark: dict[str, list[SavedRecord]]) -> str:
    records = _select(by_benchmark, "shared store", "token hit ratio")
    subtitle = "Cached share of the prompt tokens in %, simulated, by routing policy. Longer is better."
    return _bars(
        records,
        "A KV store that all workers share",
        subtitle,
        lambda label: 2 * (not label.endswith("no shared store")),
    )


def sim_cost(by_benchmark: dict[str, list[SavedRecord]]) -> str:
    records = _select(by_benchmark, "cost", "cost per million tokens")
    left, right, top, row = 110, 670, 78, 28
    most = max(record.value for record in records) * 1.12
    subtitle = "Dollars per million tokens, cached ones included, at the highest load that keeps the goal. Simulated."
    drawing = Drawing(760, top + row * len(records) + 20, "Cost of Kimi K2.5 by the size of the fleet", subtitle)
    for number, record in enumerate(records):
        y = top + row * number
        width = (right - left) * record.value / most
        drawing.text(left - 10, y + 15, record.case.partition(", ")[2], "soft", "end")
        drawing.bar(left, y + 2, width, 18, "one")
        drawing.text(left + width + 6, y + 16, f"{record.value:.4f}", "soft")
    return drawing.svg()


PLOTS: dict[str, Callable[[dict[str, list[SavedRecord]]], str]] = {
    "sim_headers": sim_headers,
    "sim_disaggregation": sim_disaggregation,
    "sim_shared_store": sim_shared_store,
    "sim_cost": sim_cost,
}

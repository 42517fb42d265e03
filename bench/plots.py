"""SVG plots of the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bench import experiment_plots, results
from bench.drawing import Drawing
from bench.results import SavedRecord

FOLDER = results.FOLDER / "plots"
TITLES = {
    "stoker_vllm_h200": "Stoker against vLLM on one H200, by batch size and workload",
    "router_cpu": "CPU time of routers per request and per streamed chunk",
}

_WORKLOADS = {  # metric -> label
    "decode step, batch 1": "decode, batch 1",
    "decode step, batch 8": "decode, batch 8",
    "decode step, batch 64": "decode, batch 64",
    "decode step, batch 256": "decode, batch 256",
    "prefill, 16 prompts of 4,096 tokens": "prefill, 16 × 4k",
    "first token of an 8,192-token prompt": "first token, 8k prompt",
    "512 requests, 1,024 in, 256 out": "512 × 1k in, 256 out",
}
_MODELS = {"Llama-3.1-8B": "one", "Qwen3-30B-A3B": "two"}


def stoker_vllm_h200(by_benchmark: dict[str, list[SavedRecord]]) -> str:
    """Horizontal bars of the ratio to vLLM: two models for each workload."""
    ratios = {
        (record.case, record.metric): record.ratio
        for record in by_benchmark["offline"]
        if record.case in _MODELS and record.metric in _WORKLOADS and record.ratio is not None
    }
    competitor = next(record.competitor for record in by_benchmark["offline"] if record.competitor)
    left, right, top, row, bar = 178, 700, 104, 46, 15
    most = max(1.0, *ratios.values()) * 1.1
    bottom = top + row * len(_WORKLOADS)
    subtitle = (
        f"Speed of Stoker divided by {competitor}; bf16, random weights. Right of the dashed line Stoker is faster."
    )
    drawing = Drawing(760, bottom + 44, "Stoker against vLLM on one H200", subtitle)

    def at(value: float) -> float:
        return left + (right - left) * value / most

    for number, (model, kind) in enumerate(_MODELS.items()):
        drawing.bar(left + 150 * number, 72, 12, 12, kind)
        drawing.text(left + 150 * number + 18, 83, model)
    for tick in (0.0, 0.5, 1.0, 1.5):
        drawing.line(at(tick), top - 8, at(tick), bottom, "grid")
        drawing.text(at(tick), bottom + 20, f"{tick:g}x", "soft", "middle")
    for number, (metric, label) in enumerate(_WORKLOADS.items()):
        y = top + row * number
        drawing.text(left - 12, y + 22, label, "text", "end")
        for place, (model, kind) in enumerate(_MODELS.items()):
            value = ratios.get((model, metric))
            if value is not None:
                drawing.bar(left, y + 2 + place * (bar + 2), at(value) - left, bar, kind)
                drawing.text(
                    at(value) + 6,
                    y + 14 + place * (bar + 2),
                    f"{value:.3f}" if 0.99 < value < 0.9995 else f"{value:.2f}",
                    "soft",
                )
    drawing.line(at(1.0), top - 8, at(1.0), bottom, "line")
    return drawing.svg()


_ROUTER_METRICS = {"CPU per request": "CPU per request, µs", "CPU per chunk": "CPU per streamed chunk, µs"}


def router_cpu(by_benchmark: dict[str, list[SavedRecord]]) -> str:
    """Two panels of horizontal bars: CPU time per request and per chunk. Far slower routers are named in words."""
    records = by_benchmark["router_overhead"]
    panels = [(label, _router_values(records, metric)) for metric, label in _ROUTER_METRICS.items()]
    shown = [[(name, value) for name, value in values if value <= 10 * values[0][1]] for _, values in panels]
    hidden = [(name, value) for _, values in panels for name, value in values if value > 10 * values[0][1]]
    left, right, top, row = 150, 690, 92, 30
    height = top + sum(34 + row * len(values) + 14 for values in shown) + (24 if hidden else 0)
    subtitle = "User and system time of the whole router, two mock workers, 32 connections. Shorter is better."
    drawing = Drawing(760, height, "CPU time that a router adds", subtitle)
    y = float(top)
    for (label, _), values in zip(panels, shown, strict=True):
        drawing.text(24, y + 4, label)
        most = max(value for _, value in values) * 1.12
        y += 18
        for name, value in values:
            drawing.text(left - 12, y + 16, name, "soft", "end")
            width = (right - left) * value / most
            drawing.bar(left, y + 3, width, 18, "one" if name == "Stoker" else "other")
            drawing.text(left + width + 6, y + 17, f"{value:g}", "text")
            y += row
        y += 30
    if hidden:
        names = f"{hidden[0][0]}: " + ", ".join(f"{value:,.0f} µs" for _, value in hidden)
        drawing.text(24, y, f"Not drawn, {names} (per request, per chunk).", "soft")
    return drawing.svg()


def _router_values(records: Sequence[SavedRecord], metric: str) -> list[tuple[str, float]]:
    """(router, value), Stoker first."""
    same = [record for record in records if record.metric == metric]
    values = [("Stoker", same[0].value)]
    return values + [
        (record.competitor, record.competitor_value) for record in same if record.competitor_value is not None
    ]


PLOTS: dict[str, Callable[[dict[str, list[SavedRecord]]], str]] = {
    "stoker_vllm_h200": stoker_vllm_h200,
    "router_cpu": router_cpu,
    **experiment_plots.PLOTS,
}


def write_all(by_benchmark: dict[str, list[SavedRecord]]) -> list[Path]:
    FOLDER.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in PLOTS.items():
        path = FOLDER / f"{name}.svg"
        path.write_text(draw(by_benchmark), encoding="utf-8")
        written.append(path)
    return written

"""Metrics of speculative decoding: what the engine counts by source and position, and the worker by kind of output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from stoker.proto.messages import EngineStats
from stoker.sched.request import GrammarSpec, TokenUsage

OutputKind = Literal["tool_call", "json", "grammar", "prose"]


def output_kind(has_called: bool, grammar: GrammarSpec | None) -> OutputKind:
    """Return what an output is. An output with text and a tool call is a tool call."""
    if has_called or (grammar is not None and grammar.kind == "structural_tag"):
        return "tool_call"
    if grammar is None:
        return "prose"
    return "json" if grammar.kind in ("json_object", "json_schema") else "grammar"


class OutputDrafts:
    """Tokens and drafts of the finished outputs, by their kind."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tokens, self._drafted, self._accepted = (
            Counter(f"stoker_output_{name}", text, ["kind"], registry=registry)
            for name, text in (
                ("tokens", "Generated tokens by kind of output"),
                ("draft_tokens", "Verified drafts by kind of output"),
                ("accepted_draft_tokens", "Accepted drafts by kind of output"),
            )
        )

    def count(self, kind: OutputKind, num_tokens: int, usage: TokenUsage) -> None:
        """Add one output of `num_tokens` tokens."""
        self._tokens.labels(kind).inc(num_tokens)
        if usage.draft_tokens:
            self._drafted.labels(kind).inc(usage.draft_tokens)
            self._accepted.labels(kind).inc(usage.accepted_draft_tokens)


def engine_draft_metrics(stats: EngineStats) -> Iterator[Metric]:
    """Yield the engine's metrics of drafts. Positions are 1 to 15, and sources are the names of drafters."""
    reports = stats.drafts
    text = "Estimated speed-up of decode-only steps by drafts, since the engine started"
    speedup = GaugeMetricFamily("stoker_draft_speedup", text, labels=[])
    if stats.draft_step_s:
        speedup.add_metric([], stats.undrafted_s / stats.draft_step_s)
    yield speedup
    steps = CounterMetricFamily("stoker_draft_spans", "Rows of steps that verified drafts", labels=["source"])
    drafted = CounterMetricFamily("stoker_draft_tokens", "Verified drafts", labels=["source"])
    accepted = CounterMetricFamily("stoker_accepted_draft_tokens", "Accepted drafts", labels=["source"])
    length = GaugeMetricFamily(
        "stoker_draft_accepted_length",
        "Mean tokens of a verified row: its accepted drafts and one more",
        labels=["source"],
    )
    for report in reports:
        num_accepted = sum(report.accepted_at)
        steps.add_metric([report.source], report.spans)
        drafted.add_metric([report.source], sum(report.drafted_at))
        accepted.add_metric([report.source], num_accepted)
        if report.spans:
            length.add_metric([report.source], 1 + num_accepted / report.spans)
    yield from (steps, drafted, accepted, length)
    for name, text, columns in (
        ("stoker_draft_position_tokens", "Verified drafts by position", [one.drafted_at for one in reports]),
        ("stoker_accepted_draft_position_tokens", "Accepted drafts by position", [one.accepted_at for one in reports]),
    ):
        family = CounterMetricFamily(name, text, labels=["position"])
        for i, counts in enumerate(zip(*columns, strict=True), 1):
            if sum(counts):
                family.add_metric([str(i)], sum(counts))
        yield family

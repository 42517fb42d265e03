"""Shows the summary of a run as a table, and writes it as JSON."""

from __future__ import annotations

import datetime
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from stoker.base.errors import ConfigError
from stoker.loadgen.summary import LoadSummary

_MOST_COLUMNS = 500


def environment() -> dict[str, str]:
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write_json(path: Path, config: Mapping[str, Any], result: LoadSummary) -> None:
    whole = {"config": config, "environment": environment(), "results": asdict(result)}
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def print_report(console: Console, result: LoadSummary) -> None:
    rates = Table(title="Load", show_header=False, title_justify="left")
    rates.add_column()
    rates.add_column(justify="right")
    cached = "not reported" if result.cached_tokens is None else f"{result.cached_tokens:,}"
    for name, value in [
        ("requests answered", f"{result.requests:,}"),
        ("requests failed", f"{result.failed:,}"),
        ("duration", f"{result.duration_s:.2f} s"),
        ("peak concurrency", f"{result.peak_concurrency:,}"),
        ("requests / s", f"{result.requests_per_s:.2f}"),
        ("output tokens / s", f"{result.output_tokens_per_s:,.1f}"),
        ("input tokens / s", f"{result.input_tokens_per_s:,.1f}"),
        ("output tokens", f"{result.output_tokens:,}"),
        ("prompt tokens", f"{result.prompt_tokens:,}"),
        ("  of them cached", cached),
    ]:
        rates.add_row(name, value)
    if result.hit_ratio is not None:
        rates.add_row("  hit ratio", f"{result.hit_ratio:.1%}")
    console.print(rates)

    times = Table(title="Latency, ms", title_justify="left")
    times.add_column("", no_wrap=True)
    columns = ("mean", "p50", "p90", "p95", "p99", "max")
    for column in columns:
        times.add_column(column, justify="right")
    for name, spread in [
        ("first token (TTFT)", result.ttft_ms),
        ("gaps (ITL)", result.itl_ms),
        ("per token (TPOT)", result.tpot_ms),
        ("whole request", result.e2e_ms),
    ]:
        if spread is not None:
            times.add_row(name, *(f"{getattr(spread, column):,.1f}" for column in columns))
    # A truncated number is useless, and a file, a pipe or a narrow window counts as 80 columns.
    whole = console.measure(times, options=console.options.update_width(_MOST_COLUMNS)).maximum
    console.width = max(console.width, whole)
    console.print(times)

    if result.without_usage:
        console.print(
            f"{result.without_usage} answers came without usage: each of their chunks is counted as one token"
        )
    for kind, count in result.errors.items():
        console.print(f"{count} x {kind}", style="red", markup=False)

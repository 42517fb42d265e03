"""Reads the gauges of the series from fleet, load book and admission."""

from __future__ import annotations

from collections.abc import Callable

from stoker.fleet.fleet import Fleet
from stoker.fleet.load_book import LoadBook


def read_fleet_gauges(
    fleet: Fleet,
    load_book: LoadBook,
    clock: Callable[[], float],
    num_running: Callable[[], int],
    num_waiting: Callable[[], int],
) -> list[float]:
    """Return the values in the order of `series_columns.GAUGES`."""
    now = clock()
    members = fleet.members()
    usable, used, running, prefill, context, backlog_s = 0, [0.0], 0, 0.0, 0.0, 0.0
    for member in members:
        usable += member.health.usable(now)
        if member.report is not None:
            used.append(member.kv_used)
            running += member.report.running_sequences
        rate = fleet.prefill_rate(member)
        load = load_book.load(member.worker_id, now, rate)
        prefill += load.prefill_tokens
        context += load.context_tokens
        if rate > 0:
            backlog_s = max(backlog_s, load.prefill_tokens / rate)
    return [
        float(num_running()),
        float(num_waiting()),
        float(len(members)),
        float(usable),
        sum(used) / max(1, len(used) - 1),
        max(used),
        prefill,
        backlog_s,
        context,
        float(running),
    ]

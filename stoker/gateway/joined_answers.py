"""Joins the answers of a gateway's processes (`--processes N`) to one GET of the admin API: the dashboard shows one gateway.

Counts, reservations and rows of the series are added, lists are merged, and a session's turns are put together. What all processes
see alike, such as a worker's report, is taken from the process that was asked. Processes that do not answer are named in `silent`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import msgspec

from stoker.gateway.insight.insight_endpoint import DEFAULT_ENTRIES, RAW_ROWS, SESSIONS_PATH
from stoker.gateway.insight.series_rows import SeriesRows
from stoker.gateway.processes import Join
from stoker.proto import admin_api as api
from stoker.proto.admin_api import GatewayStatus, NowAnswer, ReservedLoad, SeriesAnswer, WorkerList, WorkerStatus

_MAX_TURNS = 24  # of a session, as in each process

_decode_rows = msgspec.json.Decoder(SeriesRows).decode

Query = Mapping[str, str]


def admin_joins() -> dict[bytes, Join]:
    """Return the paths of `AdminEndpoint` whose answers are joined."""
    return {
        api.ADMIN_STATUS_PATH.encode(): Join(_status),
        api.ADMIN_FLEET_PATH.encode(): Join(_fleet),
    }


def insight_joins(
    show_now: Callable[[Sequence[SeriesRows]], NowAnswer], show_series: Callable[[Sequence[SeriesRows]], SeriesAnswer]
) -> dict[bytes, Join]:
    """Return the paths of `InsightEndpoint` whose answers are joined. Percentiles come from added histograms."""

    def now(bodies: Sequence[bytes], query: Query, silent: list[int]) -> NowAnswer:
        return msgspec.structs.replace(show_now([_decode_rows(body) for body in bodies]), silent=silent)

    def series(bodies: Sequence[bytes], query: Query, silent: list[int]) -> SeriesAnswer:
        return msgspec.structs.replace(show_series([_decode_rows(body) for body in bodies]), silent=silent)

    return {
        api.ADMIN_NOW_PATH.encode(): Join(now, RAW_ROWS),
        api.ADMIN_SERIES_PATH.encode(): Join(series, RAW_ROWS),
        api.ADMIN_REQUESTS_PATH.encode(): Join(_requests),
        SESSIONS_PATH: Join(_sessions),
    }


def _status(bodies: Sequence[bytes], query: Query, silent: list[int]) -> GatewayStatus:
    found = [api.decode_gateway_status(body) for body in bodies]
    return msgspec.structs.replace(
        found[0],
        draining=any(one.draining for one in found),
        running_requests=sum(one.running_requests for one in found),
        waiting_requests=sum(one.waiting_requests for one in found),
        store_trouble=next((one.store_trouble for one in found if one.store_trouble), None),
        ledger_pending_rows=sum(one.ledger_pending_rows for one in found),
        silent=silent,
    )


def _fleet(bodies: Sequence[bytes], query: Query, silent: list[int]) -> WorkerList:
    found = [{one.worker: one for one in api.decode_worker_list(body).workers} for body in bodies]
    names = dict.fromkeys(name for workers in found for name in workers)
    return WorkerList(
        workers=[_worker([workers[name] for workers in found if name in workers]) for name in names], silent=silent
    )


def _worker(views: Sequence[WorkerStatus]) -> WorkerStatus:
    """Join the views of one worker. It is usable if every process uses it, because clients reach any of them."""
    return msgspec.structs.replace(
        views[0],
        usable=all(one.usable for one in views),
        draining=any(one.draining for one in views),
        busy=any(one.busy for one in views),
        reserved=ReservedLoad(
            **{
                name: sum(getattr(one.reserved, name) for one in views)
                for name in ("requests", "prefill_tokens", "context_tokens", "output_tokens")
            }
        ),
    )


def _requests(bodies: Sequence[bytes], query: Query, silent: list[int]) -> dict[str, Any]:
    """Return the latest requests, or the one that is named: only the process that had it knows it."""
    found = [msgspec.json.decode(body) for body in bodies]
    if "request" in query:
        one: dict[str, Any] = found[0]
        return one
    requests = [request for answer in found for request in answer["requests"]]
    requests.sort(key=lambda one: one["time_s"] + 1e-3 * one["e2e_ms"], reverse=True)
    return {"requests": requests[: _most(query)], "silent": silent}


def _sessions(bodies: Sequence[bytes], query: Query, silent: list[int]) -> dict[str, Any]:
    parts: dict[str, list[dict[str, Any]]] = {}
    for body in bodies:
        for session in msgspec.json.decode(body)["sessions"]:
            parts.setdefault(session["session"], []).append(session)
    sessions = sorted(map(_session, parts.values()), key=lambda one: one["turns"][-1]["time_s"], reverse=True)
    return {"sessions": sessions[: _most(query)], "silent": silent}


def _most(query: Query) -> int:
    """Return how many entries the answer may have. Each process has checked the number."""
    return int(query.get("n", DEFAULT_ENTRIES))


def _session(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join what the processes have seen of one session: each of its requests was sent to any of them."""
    if len(parts) == 1:
        return parts[0]
    counts = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
    turns = sorted((turn for part in parts for turn in part["turns"]), key=lambda one: one["time_s"])
    latest = max(parts, key=lambda part: part["turns"][-1]["time_s"])
    return {
        **latest,
        "parent": latest["parent"] or next((part["parent"] for part in parts if part["parent"]), None),
        **{name: sum(part[name] for part in parts) for name in counts},
        "cost": str(sum(Decimal(part["cost"]) for part in parts)),
        "turns": turns[-_MAX_TURNS:],
    }

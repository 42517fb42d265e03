"""Reads usage from the store: the groups of a query in order, a page at a time, and the total of all pages.

Whole days and hours are read from their sums, and the rest of the time range from the rows. A query whose first group is the
session reads only the sessions of its page, because there may be as many sessions as rows.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from stoker.base.errors import InvalidRequest
from stoker.gateway.admission.prices import Price, in_currency
from stoker.gateway.records.usage_tables import DAY_S, HOUR_S
from stoker.gateway.store.store import Store, StoreTimeout, Transaction

_QUERY_S = 10.0
DEFAULT_LIMIT = 100

# group_by name -> SQL expression. Days and hours are in UTC, as Unix time of their start.
GROUPS = {
    "key": "key_id",
    "tenant": "tenant",
    "model": "model",
    "session": "session",
    "worker": "worker",
    "endpoint": "endpoint",
    "status": "status",
    "hour": "hour_s",
    "day": f"hour_s - hour_s % {DAY_S}",
}
FILTERS = {"key": "key_id", "tenant": "tenant", "model": "model", "session": "session"}
SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
_ONLY_IN_ROWS = "worker"  # the sums do not tell workers apart
_SESSION_OF_ROW = "COALESCE(session, '')"
_MORE_SESSIONS = 16  # read beyond a page: some have no request in the part of a day that the query names
_MAX_SPANS = 400  # in one statement


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """A parsed query string."""

    start_s: float
    end_s: float
    group_by: tuple[str, ...] = ()
    filters: tuple[tuple[str, str], ...] = ()
    as_csv: bool = False
    limit: int = DEFAULT_LIMIT
    after: tuple[Any, ...] | None = None  # the group before the page's first one

    @property
    def needed(self) -> set[str]:
        """The names of all columns that the query groups or filters by."""
        return {*self.group_by, *(name for name, _ in self.filters)}


@dataclass(frozen=True, slots=True)
class UsagePage:
    """The lines of one page, and the total of all pages."""

    lines: list[UsageLine]
    total: UsageLine
    next_after: str | None  # the cursor of the next page; None on the last one


@dataclass(slots=True)
class UsageLine:
    """The sums of one group."""

    group: tuple[Any, ...]
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost_units: int = 0

    def add(self, sums: Sequence[int], price: Price) -> None:
        requests, prompt, cached, completion = sums
        self.requests += requests
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.completion_tokens += completion
        self.cost_units += price.units(prompt, cached, completion)

    def fields(self, names: tuple[str, ...]) -> dict[str, Any]:
        named = {name: _shown(name, value) for name, value in zip(names, self.group, strict=True)}
        sums = {name: getattr(self, name) for name in SUMS}
        uncached = self.prompt_tokens - self.cached_tokens
        return {**named, **sums, "uncached_tokens": uncached, "cost": in_currency(self.cost_units)}


def read_usage(store: Store, query: UsageQuery, limit_s: float = _QUERY_S) -> UsagePage:
    """Return a page of groups in order, and the total, of requests with start <= arrival < end.

    Raises InvalidRequest if the query takes longer than `limit_s`.
    """
    # Only the page is kept. Freeing a hundred thousand lines would hold the interpreter lock for longer than a request may
    # wait for it.
    page: list[UsageLine] = []
    total = UsageLine(())
    try:
        with store.snapshot(limit_s) as reader:
            if query.group_by[:1] == ("session",) and not _reads_rows(query):
                _collect(reader, replace(query, group_by=(), after=None), [], total)
                _collect_sessions(reader, query, page, limit_s)
            else:
                _collect(reader, query, page, total)
    except StoreTimeout as error:
        message = f"{error.message} Use a shorter time range (start, end), fewer group_by names or a filter."
        raise InvalidRequest(message, code=error.code) from error
    has_more = len(page) > query.limit
    page = page[: query.limit]
    next_after = base64.urlsafe_b64encode(msgspec.json.encode(page[-1].group)).decode() if has_more else None
    return UsagePage(page, total, next_after)


def _collect(
    reader: Transaction,
    query: UsageQuery,
    page: list[UsageLine],
    total: UsageLine,
    sessions: tuple[str, str] | None = None,
) -> None:
    """Add all groups to the total, and those of the page to it, until it has one more than its limit.

    `sessions` are the first and the last session to read.
    """
    num_groups = len(query.group_by)
    groups = [GROUPS[name] for name in query.group_by]
    # Also group by price, so that each sum of tokens is multiplied by the price that was valid for it.
    by = ", ".join([*groups, "prices.input", "prices.cached_input", "prices.output"])
    parts, values = _parts(query, sessions)
    sql = (
        f"SELECT {by}, SUM(requests), SUM(prompt_tokens), SUM(cached_tokens), SUM(completion_tokens)"
        f" FROM ({' UNION ALL '.join(parts)}) AS parts JOIN prices ON prices.id = parts.price_id"
        f" GROUP BY {by} ORDER BY {by}"
    )
    for row in reader.execute(sql, values):
        group, price, sums = tuple(row[:num_groups]), Price(*row[num_groups:-4]), row[-4:]
        total.add(sums, price)
        if not page or page[-1].group != group:
            if len(page) > query.limit or (query.after is not None and not _is_after(group, query.after)):
                continue
            page.append(UsageLine(group))
        page[-1].add(sums, price)


def _collect_sessions(reader: Transaction, query: UsageQuery, page: list[UsageLine], limit_s: float) -> None:
    """Collect the page of a query whose first group is the session. Raises StoreTimeout after `limit_s`."""
    until_s = time.monotonic() + limit_s
    first, last = (f"(SELECT {one}(start_s) FROM session_sums WHERE span_s = ?)" for one in ("MIN", "MAX"))
    ((first_s, last_s),) = list(reader.execute(f"SELECT {first}, {last}", (DAY_S, DAY_S)))
    if first_s is None:
        return
    query = replace(query, start_s=max(query.start_s, first_s), end_s=min(query.end_s, last_s + DAY_S))
    after, is_included = "", True
    if query.after is not None:
        _is_after(("",), query.after[:1])  # raises InvalidRequest for a cursor of another query
        after = query.after[0]
    while len(page) <= query.limit:
        sessions = _next_sessions(reader, query, after, is_included)
        if not sessions:
            return
        if time.monotonic() >= until_s:  # the store limits single statements
            raise StoreTimeout(f"The query took longer than {limit_s:g} s and was stopped.")
        _collect(reader, query, page, UsageLine(()), (sessions[0], sessions[-1]))
        after, is_included = sessions[-1], False


def _next_sessions(reader: Transaction, query: UsageQuery, after: str, is_included: bool) -> list[str]:
    """Return the next sessions that had requests on the days of the query, in order: enough for a page, if there are."""
    count = query.limit + _MORE_SESSIONS
    filters, values = _filters(query)
    sql = (
        f"SELECT DISTINCT session FROM session_sums WHERE span_s = ? AND start_s = ?{filters}"
        f" AND session {'>=' if is_included else '>'} ? ORDER BY session LIMIT ?"
    )
    found: set[str] = set()
    for day_s in range(int(query.start_s // DAY_S) * DAY_S, math.ceil(query.end_s), DAY_S):
        found.update(session for (session,) in reader.execute(sql, (DAY_S, day_s, *values, after, count)))
    return sorted(found)[:count]


def _parts(query: UsageQuery, sessions: tuple[str, str] | None) -> tuple[list[str], list[Any]]:
    """Return SELECT statements that together cover the query's time range once, and their parameters.

    Whole days and hours are read from their sums, and the rest from the rows.
    """
    needed = query.needed
    table, names = "usage_sums", ["tenant", "key_id", "model", "endpoint", "status", "price_id"]
    if "session" in needed:
        table = "session_sums"
        names.append("session")
    if _ONLY_IN_ROWS in needed:
        names.append(_ONLY_IN_ROWS)
    columns = ", ".join(names)
    filters, filter_values = _filters(query)
    parts: list[str] = []
    values: list[Any] = []

    def add_rows(start_s: float, end_s: float) -> None:
        in_rows = ", ".join(f"{_SESSION_OF_ROW} AS session" if name == "session" else name for name in names)
        own, own_values = _filters(query, in_rows=True)
        bounds = f" AND {_SESSION_OF_ROW} >= ? AND {_SESSION_OF_ROW} <= ?" if sessions is not None else ""
        parts.append(
            f"SELECT {in_rows}, hour_s, 1 AS requests, prompt_tokens, cached_tokens, completion_tokens FROM usage"
            f" WHERE time_s >= ? AND time_s < ?{own}{bounds}"
        )
        values.extend([start_s, end_s, *own_values, *(sessions or ())])

    def add_sums(span_s: int, start_s: int, end_s: int) -> None:
        if start_s >= end_s:
            return
        spans: Sequence[int] = range(start_s, end_s, span_s)
        if table == "session_sums" and len(spans) <= _MAX_SPANS:
            times = f"start_s IN ({', '.join('?' * len(spans))})"  # the index finds the sessions of each
        else:
            times, spans = "start_s >= ? AND start_s < ?", (start_s, end_s)
        bounds = " AND session >= ? AND session <= ?" if sessions is not None else ""
        parts.append(
            f"SELECT {columns}, start_s AS hour_s, requests, prompt_tokens, cached_tokens, completion_tokens"
            f" FROM {table} WHERE span_s = {span_s} AND {times}{filters}{bounds}"
        )
        values.extend([*spans, *filter_values, *(sessions or ())])

    if _reads_rows(query):
        add_rows(query.start_s, query.end_s)
        return parts, values
    first_hour, last_hour = _whole(query.start_s, query.end_s, HOUR_S)
    first_day, last_day = _whole(first_hour, last_hour, DAY_S)
    if "hour" in query.group_by or first_day >= last_day:
        first_day = last_day = last_hour
    add_rows(query.start_s, first_hour)
    add_sums(HOUR_S, first_hour, first_day)
    add_sums(DAY_S, first_day, last_day)
    add_sums(HOUR_S, last_day, last_hour)
    add_rows(last_hour, query.end_s)
    return parts, values


def _reads_rows(query: UsageQuery) -> bool:
    """Return True if the query can only be answered from the rows. A range without a whole hour has few of them."""
    first_hour, last_hour = _whole(query.start_s, query.end_s, HOUR_S)
    return _ONLY_IN_ROWS in query.needed or first_hour >= last_hour


def _filters(query: UsageQuery, *, in_rows: bool = False) -> tuple[str, list[Any]]:
    """Return the conditions of the query's filters, and their values."""
    conditions = ""
    for name, value in query.filters:
        # In the rows, an index finds a session by its name. The others have none.
        column = _SESSION_OF_ROW if in_rows and name == "session" and not value else FILTERS[name]
        conditions += f" AND {column} = ?"
    return conditions, [value for _, value in query.filters]


def _whole(start_s: float, end_s: float, span_s: int) -> tuple[int, int]:
    """Return where the first whole span begins, and where the last one ends."""
    return math.ceil(start_s / span_s) * span_s, math.floor(end_s / span_s) * span_s


def _is_after(group: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    try:
        return group > after
    except TypeError as error:
        raise InvalidRequest("after: it belongs to a query with another group_by.", param="after") from error


def _shown(name: str, value: Any) -> Any:
    if name in ("day", "hour"):
        stamp = datetime.fromtimestamp(value, UTC)
        return stamp.strftime("%Y-%m-%d" if name == "day" else "%Y-%m-%dT%H:00Z")
    return value

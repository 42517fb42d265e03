"""`GET /v1/usage`: usage and costs from the ledger, grouped as requested, as JSON or CSV, in pages.

An API key sees its own tenant, the admin token sees all tenants. Sums and costs are computed with integers, so they are exact.
A query runs on a thread. It is aborted after a time limit, and each tenant may run only a
few at a time.
"""

from __future__ import annotations

import asyncio
import base64
import csv
import io
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from stoker.base.errors import InvalidRequest, NotFound, Overloaded
from stoker.gateway.admission.api_keys import AdminToken, ApiKeys
from stoker.gateway.admission.prices import Price, in_currency
from stoker.gateway.api.endpoint import EndpointRequest
from stoker.gateway.api.reply import Reply, json_reply, text_reply
from stoker.gateway.records.usage_tables import DAY_S, HOUR_S
from stoker.gateway.store.store import Store, StoreTimeout

_MAX_TIME_S = 2.5e11  # in the year 9892
_DEFAULT_SPAN_S = 30 * DAY_S
_QUERY_S = 10.0
_MAX_PER_TENANT = 2  # queries at a time
_DEFAULT_LIMIT = 100
_MAX_LIMIT = 1000

# group_by name -> SQL expression. Days and hours are in UTC, as Unix time of their start.
_GROUPS = {
    "key": "key_id",
    "tenant": "tenant",
    "model": "model",
    "session": "COALESCE(session, '')",
    "worker": "worker",
    "endpoint": "endpoint",
    "status": "status",
    "hour": "hour_s",
    "day": f"hour_s - hour_s % {DAY_S}",
}
_FILTERS = {"key": "key_id", "tenant": "tenant", "model": "model", "session": "session"}
_SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
_ONLY_IN_ROWS = frozenset({"session", "worker"})  # the sums of hours and days do not tell them apart
_NAMES = frozenset({"start", "end", "group_by", "format", "limit", "after", *_FILTERS})


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """A parsed query string."""

    start_s: float
    end_s: float
    group_by: tuple[str, ...] = ()
    filters: tuple[tuple[str, str], ...] = ()
    as_csv: bool = False
    limit: int = _DEFAULT_LIMIT
    after: tuple[Any, ...] | None = None  # the group before the page's first one


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
        sums = {name: getattr(self, name) for name in _SUMS}
        uncached = self.prompt_tokens - self.cached_tokens
        return {**named, **sums, "uncached_tokens": uncached, "cost": in_currency(self.cost_units)}


class UsageEndpoint:
    """Handles /v1/usage. `store` is None if metering is disabled."""

    def __init__(
        self,
        store: Store | None,
        keys: ApiKeys,
        admin: AdminToken,
        *,
        currency: str = "USD",
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._keys = keys
        self._admin = admin
        self._currency = currency
        self._unix_time = unix_time
        self._num_running: Counter[str] = Counter()  # queries by tenant; the admin's under an empty name

    async def answer(self, request: EndpointRequest) -> Reply:
        tenant, sees_workers = None, True
        if not self._admin.allows(request):
            caller = self._keys.authenticate(request)
            tenant, sees_workers = caller.tenant, not caller.known
        if self._store is None:
            raise NotFound("Metering is disabled: the gateway was started with --store none.")
        query = parse_query(request.query, self._unix_time(), tenant)
        if "worker" in query.group_by and not sees_workers:
            raise InvalidRequest(
                "group_by='worker' needs the admin token: it shows workers' addresses.", param="group_by"
            )
        name = tenant or ""
        if self._num_running[name] >= _MAX_PER_TENANT:
            message = f"This tenant has {_MAX_PER_TENANT} usage queries at a time, which is the limit; retry later."
            raise Overloaded(message, code="rate_limited")
        self._num_running[name] += 1
        try:
            return await asyncio.to_thread(self._reply, self._store, query)
        finally:
            self._num_running[name] -= 1
            if not self._num_running[name]:
                del self._num_running[name]

    def _reply(self, store: Store, query: UsageQuery) -> Reply:
        page = read_usage(store, query)
        if query.as_csv:
            return _as_csv(query, page)
        return json_reply(
            {
                "object": "usage",
                "start": query.start_s,
                "end": query.end_s,
                "group_by": query.group_by,
                "currency": self._currency,
                "data": [line.fields(query.group_by) for line in page.lines],
                "total": page.total.fields(()),
                "has_more": page.next_after is not None,
                "next_after": page.next_after,
            }
        )


def parse_query(raw: bytes, now_s: float, tenant: str | None) -> UsageQuery:
    """Parse the query string. `tenant` is the only tenant that may be seen; None allows all."""
    try:
        params = dict(parse_qsl(raw.decode("ascii"), keep_blank_values=True, strict_parsing=bool(raw)))
    except ValueError as error:
        raise InvalidRequest(f"The query string is not valid: {error}") from error
    unknown = sorted(set(params) - _NAMES)
    if unknown:
        message = f"Unknown query parameter {unknown[0]!r}; use one of: {', '.join(sorted(_NAMES))}."
        raise InvalidRequest(message, param=unknown[0])
    end_s = _time("end", params["end"]) if "end" in params else now_s
    start_s = _time("start", params["start"]) if "start" in params else end_s - _DEFAULT_SPAN_S
    if start_s > end_s:
        raise InvalidRequest(f"start ({start_s:.0f}) is after end ({end_s:.0f}).", param="start")
    groups = tuple(name.strip() for name in params.get("group_by", "").split(",") if name.strip())
    for name in groups:
        if name not in _GROUPS:
            raise InvalidRequest(f"group_by={name!r}: it must be one of {', '.join(_GROUPS)}.", param="group_by")
    if len(set(groups)) != len(groups):
        raise InvalidRequest(f"group_by={','.join(groups)!r}: a name occurs twice.", param="group_by")
    form = params.get("format", "json")
    if form not in ("json", "csv"):
        raise InvalidRequest(f"format={form!r}: it must be json or csv.", param="format")
    filters = {name: params[name] for name in _FILTERS if name in params}
    if tenant is not None:
        if filters.get("tenant", tenant) != tenant:
            message = f"This key belongs to tenant {tenant!r} and cannot read other tenants' usage."
            raise InvalidRequest(message, param="tenant")
        filters["tenant"] = tenant
    limit, after = _limit(params.get("limit")), _cursor(params.get("after"), len(groups))
    return UsageQuery(start_s, end_s, groups, tuple(sorted(filters.items())), form == "csv", limit, after)


def _limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_LIMIT
    if not (len(text) <= 8 and text.isascii() and text.isdecimal() and 1 <= int(text) <= _MAX_LIMIT):
        raise InvalidRequest(f"limit={text[:32]!r}: it must be a number from 1 to {_MAX_LIMIT}.", param="limit")
    return int(text)


def _cursor(text: str | None, num_groups: int) -> tuple[Any, ...] | None:
    """Decode `after`: the group of the last line of the previous page."""
    if text is None:
        return None
    try:
        group = msgspec.json.decode(base64.urlsafe_b64decode(text), type=list[str | int])
    except (ValueError, msgspec.DecodeError) as error:
        raise InvalidRequest("after: it must be the next_after of the previous page.", param="after") from error
    if len(group) != num_groups:
        raise InvalidRequest("after: it belongs to a query with another group_by.", param="after")
    return tuple(group)


def read_usage(store: Store, query: UsageQuery, limit_s: float = _QUERY_S) -> UsagePage:
    """Return a page of groups in order, and the total, of requests with start <= arrival < end.

    Raises InvalidRequest if the query takes longer than `limit_s`.
    """
    groups = [_GROUPS[name] for name in query.group_by]
    # Also group by price, so that each sum of tokens is multiplied by the price that was valid for it.
    by = ", ".join([*groups, "prices.input", "prices.cached_input", "prices.output"])
    parts, values = _parts(query)
    sql = (
        f"SELECT {by}, SUM(requests), SUM(prompt_tokens), SUM(cached_tokens), SUM(completion_tokens)"
        f" FROM ({' UNION ALL '.join(parts)}) AS parts JOIN prices ON prices.id = parts.price_id"
        f" GROUP BY {by} ORDER BY {by}"
    )
    # Only the page is kept. Freeing a hundred thousand lines would hold the interpreter lock for longer than a request may
    # wait for it.
    page: list[UsageLine] = []
    total = UsageLine(())
    try:
        with store.snapshot(limit_s) as reader:
            for row in reader.execute(sql, values):
                group, price, sums = tuple(row[: len(groups)]), Price(*row[len(groups) : -4]), row[-4:]
                total.add(sums, price)
                if not page or page[-1].group != group:
                    if len(page) > query.limit or (query.after is not None and not _is_after(group, query.after)):
                        continue
                    page.append(UsageLine(group))
                page[-1].add(sums, price)
    except StoreTimeout as error:
        message = f"{error.message} Use a shorter time range (start, end), fewer group_by names or a filter."
        raise InvalidRequest(message, code=error.code) from error
    has_more = len(page) > query.limit
    page = page[: query.limit]
    next_after = base64.urlsafe_b64encode(msgspec.json.encode(page[-1].group)).decode() if has_more else None
    return UsagePage(page, total, next_after)


def _parts(query: UsageQuery) -> tuple[list[str], list[Any]]:
    """Return SELECT statements that together cover the query's time range once, and their parameters.

    Whole days and hours are read from their sums, and the rest from the rows.
    """
    needed = {*query.group_by, *(name for name, _ in query.filters)}
    names = ["tenant", "key_id", "model", "endpoint", "status", "price_id", *sorted(needed & _ONLY_IN_ROWS)]
    columns = ", ".join(names)
    filters = "".join(f" AND {_FILTERS[name]} = ?" for name, _ in query.filters)
    filter_values = [value for _, value in query.filters]
    parts: list[str] = []
    values: list[Any] = []

    def add(sql: str, *times: float) -> None:
        parts.append(f"{sql}{filters}")
        values.extend([*times, *filter_values])

    def add_rows(start_s: float, end_s: float) -> None:
        add(
            f"SELECT {columns}, hour_s, 1 AS requests, prompt_tokens, cached_tokens, completion_tokens FROM usage"
            " WHERE time_s >= ? AND time_s < ?",
            start_s,
            end_s,
        )

    def add_sums(span_s: int, start_s: int, end_s: int) -> None:
        if start_s < end_s:
            add(
                f"SELECT {columns}, start_s AS hour_s, requests, prompt_tokens, cached_tokens, completion_tokens"
                f" FROM usage_sums WHERE span_s = {span_s} AND start_s >= ? AND start_s < ?",
                start_s,
                end_s,
            )

    first_hour, last_hour = _whole(query.start_s, query.end_s, HOUR_S)
    if needed & _ONLY_IN_ROWS or first_hour >= last_hour:
        add_rows(query.start_s, query.end_s)
        return parts, values
    first_day, last_day = _whole(first_hour, last_hour, DAY_S)
    if "hour" in query.group_by or first_day >= last_day:
        first_day = last_day = last_hour
    add_rows(query.start_s, first_hour)
    add_sums(HOUR_S, first_hour, first_day)
    add_sums(DAY_S, first_day, last_day)
    add_sums(HOUR_S, last_day, last_hour)
    add_rows(last_hour, query.end_s)
    return parts, values


def _whole(start_s: float, end_s: float, span_s: int) -> tuple[int, int]:
    """Return where the first whole span begins, and where the last one ends."""
    return math.ceil(start_s / span_s) * span_s, math.floor(end_s / span_s) * span_s


def _is_after(group: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    try:
        return group > after
    except TypeError as error:
        raise InvalidRequest("after: it belongs to a query with another group_by.", param="after") from error


def _time(name: str, text: str) -> float:
    """Parse Unix time, or an ISO 8601 date or date and time; without a time zone it is UTC."""
    try:
        seconds = float(text)
    except ValueError:
        pass
    else:
        if abs(seconds) <= _MAX_TIME_S:  # false for NaN too
            return seconds
        raise InvalidRequest(f"{name}={text[:32]!r}: it must be Unix time, up to {_MAX_TIME_S:.0f}.", param=name)
    try:
        stamp = datetime.fromisoformat(text.replace(" ", "+"))  # an unescaped + in a query string decodes to a space
    except ValueError as error:
        message = f"{name}={text!r}: it must be Unix time in seconds or a date such as 2026-01-31T12:00:00Z."
        raise InvalidRequest(message, param=name) from error
    return (stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp()


def _shown(name: str, value: Any) -> Any:
    if name in ("day", "hour"):
        stamp = datetime.fromtimestamp(value, UTC)
        return stamp.strftime("%Y-%m-%d" if name == "day" else "%Y-%m-%dT%H:00Z")
    return value


def _as_csv(query: UsageQuery, page: UsagePage) -> Reply:
    text = io.StringIO()
    names = [*query.group_by, *_SUMS, "uncached_tokens", "cost"]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for line in page.lines:
        writer.writerow({name: _safe_cell(value) for name, value in line.fields(query.group_by).items()})
    attachment = (b"content-disposition", b'attachment; filename="usage.csv"')
    more = [] if page.next_after is None else [(b"x-next-after", page.next_after.encode())]
    return text_reply(text.getvalue().encode(), b"text/csv; charset=utf-8", attachment, *more)


def _safe_cell(value: Any) -> Any:
    """Quote text that a spreadsheet would run as a formula: session and model names come from clients."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value

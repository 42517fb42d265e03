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
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from stoker.base.errors import InvalidRequest, NotFound, Overloaded
from stoker.gateway.admission.api_keys import AdminToken, ApiKeys
from stoker.gateway.api.endpoint import EndpointRequest
from stoker.gateway.api.reply import Reply, json_reply, text_reply
from stoker.gateway.records.usage_queries import DEFAULT_LIMIT, FILTERS, GROUPS, SUMS, UsagePage, UsageQuery, read_usage
from stoker.gateway.records.usage_tables import DAY_S
from stoker.gateway.store.store import Store

_MAX_TIME_S = 2.5e11  # in the year 9892
_DEFAULT_SPAN_S = 30 * DAY_S
_MAX_PER_TENANT = 2  # queries at a time
_MAX_LIMIT = 1000

_NAMES = frozenset({"start", "end", "group_by", "format", "limit", "after", *FILTERS})


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
        if name not in GROUPS:
            raise InvalidRequest(f"group_by={name!r}: it must be one of {', '.join(GROUPS)}.", param="group_by")
    if len(set(groups)) != len(groups):
        raise InvalidRequest(f"group_by={','.join(groups)!r}: a name occurs twice.", param="group_by")
    form = params.get("format", "json")
    if form not in ("json", "csv"):
        raise InvalidRequest(f"format={form!r}: it must be json or csv.", param="format")
    filters = {name: params[name] for name in FILTERS if name in params}
    if tenant is not None:
        if filters.get("tenant", tenant) != tenant:
            message = f"This key belongs to tenant {tenant!r} and cannot read other tenants' usage."
            raise InvalidRequest(message, param="tenant")
        filters["tenant"] = tenant
    limit, after = _limit(params.get("limit")), _cursor(params.get("after"), len(groups))
    return UsageQuery(start_s, end_s, groups, tuple(sorted(filters.items())), form == "csv", limit, after)


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
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


def _as_csv(query: UsageQuery, page: UsagePage) -> Reply:
    text = io.StringIO()
    names = [*query.group_by, *SUMS, "uncached_tokens", "cost"]
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

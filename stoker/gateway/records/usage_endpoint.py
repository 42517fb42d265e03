"""`GET /v1/usage`: usage and costs from the ledger, grouped as requested, as JSON or CSV.

An API key sees its own tenant, the admin token sees all tenants. Sums and costs are computed with integers, so they are exact.
"""

from __future__ import annotations

import asyncio
import csv
import io
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from stoker.base.errors import InvalidRequest, NotFound
from stoker.gateway.admission.api_keys import AdminToken, ApiKeys
from stoker.gateway.api.endpoint import EndpointRequest
from stoker.gateway.api.reply import Reply, json_reply, text_reply
from stoker.gateway.records.prices import Price, in_currency

_DAY_S = 86_400
_DEFAULT_SPAN_S = 30 * _DAY_S
_MAX_LINES = 100_000
_QUERY_S = 30.0

# group_by name -> SQL expression. Days and hours are in UTC, as Unix time of their start.
_GROUPS = {
    "key": "key_id",
    "tenant": "tenant",
    "model": "model",
    "session": "COALESCE(session, '')",
    "worker": "worker",
    "endpoint": "endpoint",
    "status": "status",
    "hour": "CAST(time_s / 3600 AS INTEGER) * 3600",
    "day": "CAST(time_s / 86400 AS INTEGER) * 86400",
}
_FILTERS = {"key": "key_id", "tenant": "tenant", "model": "model", "session": "session"}
_SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
_NAMES = frozenset({"start", "end", "group_by", "format", *_FILTERS})


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """A parsed query string."""

    start_s: float
    end_s: float
    group_by: tuple[str, ...] = ()
    filters: tuple[tuple[str, str], ...] = ()
    as_csv: bool = False


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
    """Handles /v1/usage. `path` is the ledger file; None if metering is disabled."""

    def __init__(
        self,
        path: Path | None,
        keys: ApiKeys,
        admin: AdminToken,
        *,
        currency: str = "USD",
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._keys = keys
        self._admin = admin
        self._currency = currency
        self._unix_time = unix_time

    async def answer(self, request: EndpointRequest) -> Reply:
        tenant = None if self._admin.allows(request) else self._keys.authenticate(request).tenant
        if self._path is None:
            raise NotFound("Metering is disabled: the gateway was started with --ledger none.")
        query = parse_query(request.query, self._unix_time(), tenant)
        lines, total = await asyncio.to_thread(read_usage, self._path, query)
        if query.as_csv:
            return _as_csv(query, lines)
        return json_reply(
            {
                "object": "usage",
                "start": query.start_s,
                "end": query.end_s,
                "group_by": query.group_by,
                "currency": self._currency,
                "data": [line.fields(query.group_by) for line in lines],
                "total": total.fields(()),
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
    return UsageQuery(start_s, end_s, groups, tuple(sorted(filters.items())), form == "csv")


def read_usage(path: Path, query: UsageQuery) -> tuple[list[UsageLine], UsageLine]:
    """Return the groups in order, and the total, of requests with start <= arrival < end."""
    groups = [_GROUPS[name] for name in query.group_by]
    where = ["time_s >= ?", "time_s < ?", *(f"{_FILTERS[name]} = ?" for name, _ in query.filters)]
    # Also group by price, so that each sum of tokens is multiplied by the price that was valid for it.
    by = ", ".join([*groups, "prices.input", "prices.cached_input", "prices.output"])
    sql = (
        f"SELECT {by}, COUNT(*), SUM(prompt_tokens), SUM(cached_tokens), SUM(completion_tokens)"
        f" FROM usage JOIN prices ON prices.id = usage.price_id WHERE {' AND '.join(where)} GROUP BY {by}"
    )
    values = (query.start_s, query.end_s, *(value for _, value in query.filters))
    lines: dict[tuple[Any, ...], UsageLine] = {}
    total = UsageLine(())
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=_QUERY_S)) as connection:
        for row in connection.execute(sql, values):
            group, price, sums = tuple(row[: len(groups)]), Price(*row[len(groups) : -4]), row[-4:]
            if group not in lines and len(lines) >= _MAX_LINES:
                raise InvalidRequest(
                    f"The result has more than {_MAX_LINES} lines; use a shorter time range or fewer group_by names."
                )
            lines.setdefault(group, UsageLine(group)).add(sums, price)
            total.add(sums, price)
    return [lines[group] for group in sorted(lines)], total


def _time(name: str, text: str) -> float:
    """Parse Unix time, or an ISO 8601 date or date and time; without a time zone it is UTC."""
    try:
        return float(text)
    except ValueError:
        pass
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


def _as_csv(query: UsageQuery, lines: list[UsageLine]) -> Reply:
    text = io.StringIO()
    names = [*query.group_by, *_SUMS, "uncached_tokens", "cost"]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for line in lines:
        writer.writerow({name: _safe_cell(value) for name, value in line.fields(query.group_by).items()})
    attachment = (b"content-disposition", b'attachment; filename="usage.csv"')
    return text_reply(text.getvalue().encode(), b"text/csv; charset=utf-8", attachment)


def _safe_cell(value: Any) -> Any:
    """Quote text that a spreadsheet would run as a formula: session and model names come from clients."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value

"""The data of the dashboard and of `stoker upgrade`, as JSON.

These are `GET /admin/now`, `/admin/series`, `/admin/requests`, `/admin/sessions`, `/admin/canaries` and `/admin/kv`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from stoker.base.errors import InvalidRequest, NotFound
from stoker.gateway.admission.admin_access import admin_refusal
from stoker.gateway.admission.api_keys import AdminToken
from stoker.gateway.api.endpoint import EndpointRequest
from stoker.gateway.api.reply import Reply, json_reply, method_not_allowed
from stoker.gateway.insight.insight_book import InsightBook
from stoker.gateway.insight.kv_pages import KvPages
from stoker.proto.admin_api import ADMIN_CANARIES_PATH, ADMIN_NOW_PATH, ADMIN_REQUESTS_PATH, ADMIN_SERIES_PATH

DEFAULT_ENTRIES = 100  # of a list
_MAX_REQUESTS = 1000
_MAX_SESSIONS = 512
_NOW, _SERIES = ADMIN_NOW_PATH.encode(), ADMIN_SERIES_PATH.encode()
_REQUESTS, _CANARIES = ADMIN_REQUESTS_PATH.encode(), ADMIN_CANARIES_PATH.encode()
SESSIONS_PATH, _KV = b"/admin/sessions", b"/admin/kv"
RAW_ROWS = b"rows=1"  # with /admin/now and /admin/series, between processes: rows that can be added
INSIGHT_PATHS = frozenset({_NOW, _SERIES, _REQUESTS, SESSIONS_PATH, _CANARIES, _KV})

_Handler = Callable[[dict[str, str]], Awaitable[Any]]


class InsightEndpoint:
    """Handles the paths in INSIGHT_PATHS."""

    def __init__(self, token: AdminToken, book: InsightBook, kv: KvPages) -> None:
        self._token = token
        self._book = book
        self._kv = kv
        self._handlers: dict[bytes, _Handler] = {
            _NOW: self._now,
            _SERIES: self._series,
            _REQUESTS: self._requests,
            SESSIONS_PATH: self._sessions,
            _CANARIES: self._canaries,
            _KV: self._kv_page,
        }

    async def answer(self, request: EndpointRequest) -> Reply:
        refusal = admin_refusal(self._token, request)
        if refusal is not None:
            return refusal
        if request.method != b"GET":
            return method_not_allowed(request.path, request.method, [b"GET"])
        query = dict(parse_qsl(request.query.decode("latin-1"), keep_blank_values=True))
        return json_reply(await self._handlers[request.path](query))

    async def _now(self, query: dict[str, str]) -> Any:
        return self._book.now_rows() if "rows" in query else self._book.now()

    async def _series(self, query: dict[str, str]) -> Any:
        step = number_of(query, "step", 1, 1, 1 << 20)
        if step not in self._book.steps_s:
            steps = ", ".join(map(str, self._book.steps_s))
            raise InvalidRequest(
                f"step={step}: the series has points of these lengths in seconds: {steps}", param="step"
            )
        most = self._book.max_points(step)
        count = number_of(query, "n", min(300, most), 1, most)
        return self._book.series_rows(step, count) if "rows" in query else self._book.series(step, count)

    async def _requests(self, query: dict[str, str]) -> Any:
        name = query.get("request")
        if name is None:
            count = number_of(query, "n", DEFAULT_ENTRIES, 1, _MAX_REQUESTS)
            return {"requests": [one.as_dict() for one in self._book.requests(count)]}
        found = self._book.request(name)
        if found is None:
            raise NotFound(
                f"request={name[:128]!r}: it is not among the latest {_MAX_REQUESTS} requests.", param="request"
            )
        return found.as_dict(with_candidates=True)

    async def _sessions(self, query: dict[str, str]) -> Any:
        return {"sessions": self._book.sessions.report(number_of(query, "n", DEFAULT_ENTRIES, 1, _MAX_SESSIONS))}

    async def _canaries(self, query: dict[str, str]) -> Any:
        return self._book.canaries.report()

    async def _kv_page(self, query: dict[str, str]) -> Any:
        return await self._kv.report()


def number_of(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """Return a number of the query. Raises InvalidRequest if it is outside the bounds."""
    text = query.get(name, str(default))
    if not (len(text) <= 8 and text.isascii() and text.isdecimal() and least <= int(text) <= most):
        raise InvalidRequest(f"{name}={text[:40]!r}: it must be a number from {least} to {most}.", param=name)
    return int(text)

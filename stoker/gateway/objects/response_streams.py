"""ResponseStreams: the events of background responses for clients, from the store, as they are added."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

from stoker.base.errors import Overloaded
from stoker.gateway.http import Headers, HttpRequest
from stoker.gateway.objects import response_table as table
from stoker.gateway.objects.response_events import events_beyond
from stoker.gateway.objects.response_runs import ResponseRuns
from stoker.gateway.objects.response_table import StoredResponse
from stoker.gateway.objects.slow_clients import wait_for_room
from stoker.gateway.store.store import Transaction
from stoker.gateway.store.store_threads import StoreThreads

_SSE: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_POLL_S = 0.25  # before the next query for events of a response that another gateway runs
_MAX_POLL_S = 2.0  # the same, if there were no events for a while
_PER_RESPONSE = 4  # streams of a tenant for each background response that it may have


class ResponseStreams:
    """The streams of one gateway. Each asks the store again and again, so their number is bounded."""

    def __init__(self, store: StoreThreads, runs: ResponseRuns, max_background: int) -> None:
        self._store = store
        self._runs = runs
        self._most = _PER_RESPONSE * max_background
        self._num_open: Counter[str] = Counter()  # by tenant

    def check(self, tenant: str) -> None:
        """Raise Overloaded if the tenant has the maximum of streams."""
        if self._num_open[tenant] >= self._most:
            message = f"This tenant has {self._most} streams of background responses, which is the limit; retry later."
            raise Overloaded(message, retry_after_s=5.0, code="rate_limited")

    async def follow(self, client: HttpRequest, row: StoredResponse, after: int) -> None:
        """Send the events after number `after`, as they are stored, to the end of the response."""
        client.on_gone = client.task.cancel
        client.start(200, _SSE)
        self._num_open[row.tenant] += 1
        try:
            await self._send(client, row, after)
        except asyncio.CancelledError:
            if not client.gone:
                raise
            return
        finally:
            self._num_open[row.tenant] -= 1
            self._num_open += Counter()  # forgets tenants without streams
        client.finish()

    async def _send(self, client: HttpRequest, row: StoredResponse, after: int) -> None:
        poll_s = _POLL_S
        while True:
            pieces, is_finished = await self._store.read(partial(_pieces, row=row, after=after))
            for last, events in pieces:
                client.write(events_beyond(events, after))
                after = last
                await wait_for_room(client)
            if pieces:
                poll_s = _POLL_S
                continue
            if is_finished:
                return
            await self._runs.changed(row.id, poll_s)
            poll_s = min(1.5 * poll_s, _MAX_POLL_S)


def _pieces(reader: Transaction, row: StoredResponse, after: int) -> tuple[list[tuple[int, bytes]], bool]:
    return table.events_after(reader, row.id, after), table.is_finished(reader, row.tenant, row.id)

"""Deletes old rows from the store: usage rows, sums of sessions, audit entries, and what sessions have spent.

Sums of hours and days stay. Those of a session are deleted when all of their hour or day is too old.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from stoker.base.errors import Overloaded
from stoker.base.log import EventLog
from stoker.base.long_task import TaskErrors, repeat
from stoker.gateway.records.usage_tables import DAY_S, HOUR_S
from stoker.gateway.store.store import StoreRefused, Transaction
from stoker.gateway.store.store_threads import StoreThreads

_EVERY_S = 3600.0
_FIRST_S = 60.0
_ROWS = 500  # in a transaction, so that no other one waits long for it
_PAUSE_S = 0.05
_SESSION_SUM = "span_s, start_s, tenant, session, key_id, model, endpoint, status, price_id"
_DELETIONS = tuple(
    f"DELETE FROM {table} WHERE ({key}) IN (SELECT {key} FROM {table} WHERE {time_s} < ? {more}LIMIT {_ROWS}) RETURNING 1"
    for table, key, time_s, more in (
        ("usage", "request_id", "time_s", "ORDER BY time_s "),
        ("billed_prompts", "name", "time_s", "ORDER BY time_s "),
        ("session_sums", _SESSION_SUM, "start_s", f"- {DAY_S} AND span_s = {DAY_S} "),
        ("session_sums", _SESSION_SUM, "start_s", f"- {HOUR_S} AND span_s = {HOUR_S} "),
        ("audit", "id", "time_s", "ORDER BY time_s "),
        ("spent", "name", "at_s", "AND name >= 'session/' AND name < 'session0' "),
    )
)

log = EventLog("store")


class Retention:
    """Deletes rows that are older than `keep_days`, once in an hour. None keeps everything."""

    def __init__(
        self,
        threads: StoreThreads | None,
        keep_days: float | None,
        unix_time: Callable[[], float] = time.time,
        errors: TaskErrors | None = None,
    ) -> None:
        self._threads = threads
        self._keep_days = keep_days
        self._unix_time = unix_time
        self._errors = errors or TaskErrors()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._threads is not None and self._keep_days is not None:
            self._task = asyncio.create_task(self._run(self._threads, self._keep_days))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, threads: StoreThreads, keep_days: float) -> None:
        async def turn() -> None:
            try:
                await delete_old(threads, self._unix_time() - keep_days * DAY_S)
            except (Overloaded, StoreRefused) as error:
                log.warning("old_rows_not_deleted", reason=error.message)
            await asyncio.sleep(_EVERY_S)

        await asyncio.sleep(_FIRST_S)
        await repeat("retention", turn, self._errors)


async def delete_old(threads: StoreThreads, before_s: float) -> int:
    """Delete all rows from before a moment, some at a time, and return how many."""
    total = 0
    for sql in _DELETIONS:

        def delete(changes: Transaction, sql: str = sql) -> int:
            return len(list(changes.execute(sql, (before_s,))))

        while deleted := await threads.write(delete):
            total += deleted
            await asyncio.sleep(_PAUSE_S)
    if total:
        log.event("old_rows_deleted", rows=total)
    return total

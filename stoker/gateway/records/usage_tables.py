"""The ledger's tables in the store, and how rows are written to them.

`usage` has one row per request. `usage_sums` has the sums of each hour and of each day, so that a query over a month need not
read a million rows. Both are changed in the same transaction, and only a row that is new is added to the sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from typing import Any

from stoker.gateway.admission.prices import Price
from stoker.gateway.records.usage_row import UsageRow
from stoker.gateway.store.store import Tables, Transaction

HOUR_S = 3600
DAY_S = 86_400
_MAX_TEXT = 256
_MAX_ROWS_PER_STATEMENT = 256

_SUM_KEY = "tenant, key_id, model, endpoint, status, price_id"
_SUMS_OF_ROWS = (
    f"{_SUM_KEY}, COUNT(*), SUM(prompt_tokens), SUM(cached_tokens), SUM(completion_tokens) FROM usage GROUP BY"
)

TABLES = Tables(
    "usage",
    (
        (
            """CREATE TABLE prices (
                id INTEGER PRIMARY KEY,
                input INTEGER NOT NULL, cached_input INTEGER NOT NULL, output INTEGER NOT NULL,
                UNIQUE (input, cached_input, output)
            )""",
            """CREATE TABLE usage (
                request_id TEXT PRIMARY KEY,
                time_s REAL NOT NULL,
                key_id TEXT NOT NULL, tenant TEXT NOT NULL, model TEXT NOT NULL, session TEXT,
                worker TEXT NOT NULL, endpoint TEXT NOT NULL, status INTEGER NOT NULL,
                prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
                ttft_ms REAL, e2e_ms REAL NOT NULL, resumed INTEGER NOT NULL,
                x_request_id TEXT NOT NULL,
                price_id INTEGER NOT NULL REFERENCES prices (id)
            ) WITHOUT ROWID""",
            "CREATE INDEX usage_by_time ON usage (time_s)",
        ),
        (
            "ALTER TABLE usage ADD COLUMN hour_s INTEGER NOT NULL DEFAULT 0",
            f"UPDATE usage SET hour_s = CAST(time_s / {HOUR_S} AS INTEGER) * {HOUR_S}",
            f"""CREATE TABLE usage_sums (
                span_s INTEGER NOT NULL, start_s INTEGER NOT NULL,
                tenant TEXT NOT NULL, key_id TEXT NOT NULL, model TEXT NOT NULL, endpoint TEXT NOT NULL,
                status INTEGER NOT NULL, price_id INTEGER NOT NULL REFERENCES prices (id),
                requests INTEGER NOT NULL,
                prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
                PRIMARY KEY (span_s, start_s, {_SUM_KEY})
            ) WITHOUT ROWID""",
            f"INSERT INTO usage_sums SELECT {HOUR_S}, hour_s, {_SUMS_OF_ROWS} hour_s, {_SUM_KEY}",
            f"INSERT INTO usage_sums SELECT {DAY_S}, hour_s - hour_s % {DAY_S} AS day_s, {_SUMS_OF_ROWS} day_s, {_SUM_KEY}",
            "CREATE INDEX usage_by_session ON usage (session, time_s)",
        ),
        ("ALTER TABLE usage ADD COLUMN misses TEXT NOT NULL DEFAULT ''",),
    ),
)
_COLUMNS = (
    "request_id, time_s, key_id, tenant, model, session, worker, endpoint, status, prompt_tokens, cached_tokens,"
    " completion_tokens, ttft_ms, e2e_ms, resumed, x_request_id, price_id, hour_s, misses"
)
_NUM_COLUMNS = _COLUMNS.count(",") + 1
_SUM_COLUMNS = f"span_s, start_s, {_SUM_KEY}, requests, prompt_tokens, cached_tokens, completion_tokens"
_NUM_SUM_COLUMNS = _SUM_COLUMNS.count(",") + 1
_ADDED = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")


def price_id(changes: Transaction, price: Price) -> int:
    """Return the id of a price. Rows refer to it, so a new price list does not change old rows."""
    values = (price.input, price.cached_input, price.output)
    changes.execute("INSERT INTO prices (input, cached_input, output) VALUES (?, ?, ?) ON CONFLICT DO NOTHING", values)
    query = "SELECT id FROM prices WHERE input = ? AND cached_input = ? AND output = ?"
    return int(next(iter(changes.execute(query, values)))[0])


def insert_usage(changes: Transaction, rows: Sequence[tuple[UsageRow, int]]) -> list[UsageRow]:
    """Insert rows with the ids of their prices and return those that are new. The others change nothing."""
    new: set[str] = set()
    inserted: list[UsageRow] = []
    values = [_values(row, price) for row, price in rows]
    for many in _groups(values):
        new.update(name for (name,) in changes.execute(_insertion(len(many)), list(chain.from_iterable(many))))
    sums: dict[tuple[Any, ...], list[int]] = {}
    for row, price in rows:
        if row.request_id in new:
            new.discard(row.request_id)  # it may be in the batch twice
            inserted.append(row)
            hour_s = _hour_s(row)
            for span_s, start_s in ((DAY_S, hour_s - hour_s % DAY_S), (HOUR_S, hour_s)):
                key = (span_s, start_s, row.tenant, row.key_id, row.model[:_MAX_TEXT], row.endpoint, row.status, price)
                counts = sums.setdefault(key, [0, 0, 0, 0])
                for index, more in enumerate((1, row.prompt_tokens, row.cached_tokens, row.completion_tokens)):
                    counts[index] += more
    # In one order, so that gateways which write at the same time cannot wait for each other in a circle.
    for several in _groups([(*key, *sums[key]) for key in sorted(sums)]):
        changes.execute(_addition(len(several)), list(chain.from_iterable(several)))
    return inserted


def _groups(rows: Sequence[tuple[Any, ...]]) -> Iterable[Sequence[tuple[Any, ...]]]:
    """Split rows into powers of two, so that few different statements are prepared.

    Many rows share a statement, because every statement releases the GIL and contends with the event loop to get it back.
    """
    at = 0
    while at < len(rows):
        count = 1 << min(len(rows) - at, _MAX_ROWS_PER_STATEMENT).bit_length() - 1
        yield rows[at : at + count]
        at += count


@cache
def _insertion(num_rows: int) -> str:
    row = f"({', '.join('?' * _NUM_COLUMNS)})"
    return (
        f"INSERT INTO usage ({_COLUMNS}) VALUES {', '.join([row] * num_rows)}"
        " ON CONFLICT (request_id) DO NOTHING RETURNING request_id"
    )


@cache
def _addition(num_rows: int) -> str:
    row = f"({', '.join('?' * _NUM_SUM_COLUMNS)})"
    added = ", ".join(f"{name} = usage_sums.{name} + excluded.{name}" for name in _ADDED)
    return (
        f"INSERT INTO usage_sums ({_SUM_COLUMNS}) VALUES {', '.join([row] * num_rows)}"
        f" ON CONFLICT (span_s, start_s, {_SUM_KEY}) DO UPDATE SET {added}"
    )


def _hour_s(row: UsageRow) -> int:
    return int(row.time_s // HOUR_S) * HOUR_S


def _values(row: UsageRow, price: int) -> tuple[Any, ...]:
    return (
        row.request_id,
        row.time_s,
        row.key_id,
        row.tenant,
        row.model[:_MAX_TEXT],
        None if row.session is None else row.session[:_MAX_TEXT],
        row.worker,
        row.endpoint,
        row.status,
        row.prompt_tokens,
        row.cached_tokens,
        row.completion_tokens,
        row.ttft_ms,
        row.e2e_ms,
        row.resumed,
        row.x_request_id[:_MAX_TEXT],
        price,
        _hour_s(row),
        row.misses,
    )

"""The ledger's tables in the store, and how rows are written to them.

`usage` has one row per request. `usage_sums` has the sums of each hour and of each day, so that a query over a month need not
read a million rows, and `session_sums` has them for each session. All are changed in the same transaction, and only a row that
is new is added to the sums.

An answer that another gateway takes over has a row for each of its runs. The ids of these rows begin with the name of the
answer, and `billed_prompts` has the names whose prompt is in a row already. So each prompt is billed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from typing import Any

from msgspec.structs import replace

from stoker.gateway.admission.prices import Price
from stoker.gateway.records.usage_row import UsageRow
from stoker.gateway.store.store import Tables, Transaction

HOUR_S = 3600
DAY_S = 86_400
_MAX_TEXT = 256
_MAX_ROWS_PER_STATEMENT = 256

_SUM_KEY = "tenant, key_id, model, endpoint, status, price_id"
_SESSION_KEY = "tenant, session, key_id, model, endpoint, status, price_id"
_SESSION_OF_ROW = "tenant, COALESCE(session, ''), key_id, model, endpoint, status, price_id"
_TOTALS = "COUNT(*), SUM(prompt_tokens), SUM(cached_tokens), SUM(completion_tokens)"
_SUMS_OF_ROWS = f"{_SUM_KEY}, {_TOTALS} FROM usage GROUP BY"
_SUMS_OF_SESSIONS = f"{_SESSION_OF_ROW}, {_TOTALS} FROM usage GROUP BY"
_FORGOTTEN_ROWS = 5000  # in a transaction
_FORGOTTEN = (
    "UPDATE usage SET in_sessions = 1 WHERE request_id IN"
    f" (SELECT request_id FROM usage WHERE in_sessions = 0 LIMIT {_FORGOTTEN_ROWS}) AND in_sessions = 0"
    f" RETURNING hour_s, {_SESSION_OF_ROW}, prompt_tokens, cached_tokens, completion_tokens"
)
_RUN = "/"  # between the name of an answer and the id of a run

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
        (
            f"""CREATE TABLE session_sums (
                span_s INTEGER NOT NULL, start_s INTEGER NOT NULL,
                tenant TEXT NOT NULL, session TEXT NOT NULL, key_id TEXT NOT NULL, model TEXT NOT NULL,
                endpoint TEXT NOT NULL, status INTEGER NOT NULL, price_id INTEGER NOT NULL REFERENCES prices (id),
                requests INTEGER NOT NULL,
                prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
                PRIMARY KEY (span_s, start_s, {_SESSION_KEY})
            ) WITHOUT ROWID""",
            f"INSERT INTO session_sums SELECT {HOUR_S}, hour_s, {_SUMS_OF_SESSIONS} hour_s, {_SESSION_OF_ROW}",
            f"INSERT INTO session_sums SELECT {DAY_S}, hour_s - hour_s % {DAY_S} AS day_s,"
            f" {_SUMS_OF_SESSIONS} day_s, {_SESSION_OF_ROW}",
            "CREATE INDEX session_sums_by_session ON session_sums (span_s, start_s, session)",
            # Rows that a gateway of the version before writes from now on have 0.
            "ALTER TABLE usage ADD COLUMN in_sessions INTEGER NOT NULL DEFAULT 0",
            "UPDATE usage SET in_sessions = 1",
            "CREATE INDEX usage_not_in_sessions ON usage (request_id) WHERE in_sessions = 0",
            "CREATE TABLE billed_prompts (name TEXT PRIMARY KEY, time_s REAL NOT NULL) WITHOUT ROWID",
            "CREATE INDEX billed_prompts_by_time ON billed_prompts (time_s)",
        ),
    ),
)
_COLUMNS = (
    "request_id, time_s, key_id, tenant, model, session, worker, endpoint, status, prompt_tokens, cached_tokens,"
    " completion_tokens, ttft_ms, e2e_ms, resumed, x_request_id, price_id, hour_s, misses, in_sessions"
)
_NUM_COLUMNS = _COLUMNS.count(",") + 1
_ADDED = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")

_Sums = dict[tuple[Any, ...], list[int]]  # a key of a table of sums -> its four counts


def price_id(changes: Transaction, price: Price) -> int:
    """Return the id of a price. Rows refer to it, so a new price list does not change old rows."""
    values = (price.input, price.cached_input, price.output)
    changes.execute("INSERT INTO prices (input, cached_input, output) VALUES (?, ?, ?) ON CONFLICT DO NOTHING", values)
    query = "SELECT id FROM prices WHERE input = ? AND cached_input = ? AND output = ?"
    return int(next(iter(changes.execute(query, values)))[0])


def run_id(answer: str, row_id: str) -> str:
    """Return the id of the row of one run of an answer. The prompt of all its runs is billed once."""
    return f"{answer}{_RUN}{row_id}"


def insert_usage(changes: Transaction, rows: Sequence[tuple[UsageRow, int]]) -> list[UsageRow]:
    """Insert rows with the ids of their prices and return those that are new. The others change nothing."""
    rows = _with_own_prompts(changes, rows)
    new: set[str] = set()
    inserted: list[UsageRow] = []
    values = [_values(row, price) for row, price in rows]
    for many in _groups(values):
        new.update(name for (name,) in changes.execute(_insertion(len(many)), list(chain.from_iterable(many))))
    hours: _Sums = {}
    for row, price in rows:
        if row.request_id in new:
            new.discard(row.request_id)  # it may be in the batch twice
            inserted.append(row)
            session, model = (row.session or "")[:_MAX_TEXT], row.model[:_MAX_TEXT]
            key = (_hour_s(row), row.tenant, session, row.key_id, model, row.endpoint, row.status, price)
            _count(hours, key, (1, row.prompt_tokens, row.cached_tokens, row.completion_tokens))
    _add_sums(changes, hours)
    return inserted


def _add_sums(changes: Transaction, hours: _Sums) -> None:
    """Add the sums of the new rows by hour and session to all tables of sums."""
    sums: _Sums = {}
    sessions: _Sums = {}
    for (hour_s, tenant, session, *key), counts in hours.items():
        for span in ((DAY_S, hour_s - hour_s % DAY_S), (HOUR_S, hour_s)):
            _count(sums, (*span, tenant, *key), counts)
            _count(sessions, (*span, tenant, session, *key), counts)
    _add(changes, "usage_sums", _SUM_KEY, sums)
    _add(changes, "session_sums", _SESSION_KEY, sessions)


def sum_forgotten_sessions(changes: Transaction) -> bool:
    """Add rows that gateways without `session_sums` have written to it: they may run beside this one during an upgrade.

    Only some are added. Return True if there may be more.
    """
    sums: _Sums = {}
    num_rows = 0
    for hour_s, *key, prompt, cached, completion in changes.execute(_FORGOTTEN):
        num_rows += 1
        for span in ((DAY_S, hour_s - hour_s % DAY_S), (HOUR_S, hour_s)):
            _count(sums, (*span, *key), (1, prompt, cached, completion))
    _add(changes, "session_sums", _SESSION_KEY, sums)
    return num_rows == _FORGOTTEN_ROWS


def _with_own_prompts(changes: Transaction, rows: Sequence[tuple[UsageRow, int]]) -> Sequence[tuple[UsageRow, int]]:
    """Return the rows, without the prompts that other runs of the same answers have billed."""
    answers = {_answer(row): row.time_s for row, _ in rows if _RUN in row.request_id and row.prompt_tokens}
    if not answers:
        return rows
    query = "INSERT INTO billed_prompts (name, time_s) VALUES (?, ?) ON CONFLICT DO NOTHING RETURNING name"
    unbilled = {name for name in sorted(answers) if list(changes.execute(query, (name, answers[name])))}
    own = []
    for row, price in rows:
        answer = _answer(row)
        if answer in answers and row.prompt_tokens:
            if answer in unbilled:
                unbilled.discard(answer)
            else:
                row = replace(row, prompt_tokens=0, cached_tokens=0, misses="")
        own.append((row, price))
    return own


def _answer(row: UsageRow) -> str:
    return row.request_id.partition(_RUN)[0]


def _count(sums: _Sums, key: tuple[Any, ...], counts: Sequence[int]) -> None:
    found = sums.setdefault(key, [0, 0, 0, 0])
    for index, more in enumerate(counts):
        found[index] += more


def _add(changes: Transaction, table: str, key: str, sums: _Sums) -> None:
    # In one order, so that gateways which write at the same time cannot wait for each other in a circle.
    for several in _groups([(*one, *sums[one]) for one in sorted(sums)]):
        changes.execute(_addition(table, key, len(several)), list(chain.from_iterable(several)))


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
def _addition(table: str, key: str, num_rows: int) -> str:
    columns = f"span_s, start_s, {key}, {', '.join(_ADDED)}"
    row = f"({', '.join('?' * (columns.count(',') + 1))})"
    added = ", ".join(f"{name} = {table}.{name} + excluded.{name}" for name in _ADDED)
    return (
        f"INSERT INTO {table} ({columns}) VALUES {', '.join([row] * num_rows)}"
        f" ON CONFLICT (span_s, start_s, {key}) DO UPDATE SET {added}"
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
        1,
    )

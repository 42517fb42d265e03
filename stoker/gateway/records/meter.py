"""The ledger: one row per request in a SQLite file, written in batches by its own thread.

Guarantees:

- A row's request id is its primary key, and a batch is one transaction. A batch that is written again after an uncertain
  commit does not duplicate rows.
- After `close()` every recorded row is on disk. After `kill -9`, every committed batch is complete and nothing of the next
  one is there: at most the rows of the last `flush_s` (or `flush_rows`) plus one commit are missing. Commits are synced
  (WAL, synchronous=FULL), so the same holds for a power failure.
- `record()` never blocks. If the disk is slow or fails, rows wait in memory and the batch is retried. From `max_pending` rows
  on, `behind` is True and the gateway refuses new requests, so that no request goes unbilled.
- Several gateways may share a file. Readers never wait for the writer.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from stoker.base.errors import ConfigError
from stoker.base.log import EventLog
from stoker.gateway.config import MeterSettings
from stoker.gateway.records.prices import Price, PriceList
from stoker.gateway.records.usage_row import UsageRow

SCHEMA_VERSION = 1
_MAX_TEXT = 256
_RETRY_S = (0.05, 0.2, 1.0, 5.0)
_CLOSE_TRIES = 3

_SCHEMA = """
CREATE TABLE IF NOT EXISTS prices (
    id INTEGER PRIMARY KEY,
    input INTEGER NOT NULL, cached_input INTEGER NOT NULL, output INTEGER NOT NULL,
    UNIQUE (input, cached_input, output)
);
CREATE TABLE IF NOT EXISTS usage (
    request_id TEXT PRIMARY KEY,
    time_s REAL NOT NULL,
    key_id TEXT NOT NULL, tenant TEXT NOT NULL, model TEXT NOT NULL, session TEXT,
    worker TEXT NOT NULL, endpoint TEXT NOT NULL, status INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    ttft_ms REAL, e2e_ms REAL NOT NULL, resumed INTEGER NOT NULL,
    x_request_id TEXT NOT NULL,
    price_id INTEGER NOT NULL REFERENCES prices (id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS usage_by_time ON usage (time_s);
"""
_NUM_COLUMNS = 17
_MAX_ROWS_PER_STATEMENT = 256
# Errors that a retry cannot fix: numbers beyond 64 bits, invalid Unicode, a missing value.
_BAD_ROW = (OverflowError, UnicodeError, sqlite3.IntegrityError, sqlite3.InterfaceError)

log = EventLog("meter")


class NoMeter:
    """Stands in for Meter when metering is disabled."""

    pending = 0
    written = 0
    behind = False
    path: Path | None = None

    def record(self, row: UsageRow) -> None:
        pass

    def close(self, timeout_s: float = 30.0) -> None:
        pass


class Meter:
    """Writes usage rows to the ledger in the background."""

    def __init__(self, path: Path, settings: MeterSettings, prices: PriceList) -> None:
        self.path = path
        self._settings = settings
        self._prices = prices
        self._rows: deque[UsageRow] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._unwritten = 0  # rows in the batch being written
        self.written = 0
        connect(path).close()  # fail at startup if the ledger cannot be opened
        self._thread = threading.Thread(target=self._run, name="meter", daemon=True)
        self._thread.start()

    def record(self, row: UsageRow) -> None:
        self._rows.append(row)
        if len(self._rows) == self._settings.flush_rows:
            self._wake.set()

    @property
    def pending(self) -> int:
        return len(self._rows) + self._unwritten

    @property
    def behind(self) -> bool:
        return len(self._rows) >= self._settings.max_pending

    def close(self, timeout_s: float = 30.0) -> None:
        """Write the remaining rows. After a few failed attempts they are given up, with an error in the log."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        if self.pending:
            log.error("usage_rows_lost", rows=self.pending, path=str(self.path))

    def _run(self) -> None:
        connection = connect(self.path)
        price_ids: dict[Price, int] = {}
        try:
            while True:
                self._wake.wait(self._settings.flush_s)
                self._wake.clear()
                closing = self._closing  # read first, so that all rows recorded before close() are written below
                while self._rows:
                    batch = [self._rows.popleft() for _ in range(min(len(self._rows), self._settings.flush_rows))]
                    self._unwritten = len(batch)
                    if not self._write(connection, batch, price_ids):
                        return
                    self._unwritten = 0
                    if len(self._rows) < self._settings.flush_rows and not closing:
                        break  # not a full batch yet, and a commit costs the same for a few rows as for many
                if closing:
                    return
        finally:
            connection.close()

    def _write(self, connection: sqlite3.Connection, batch: Sequence[UsageRow], price_ids: dict[Price, int]) -> bool:
        """Retry until the batch is on disk. Return False if given up because the gateway is stopping."""
        tries = 0
        while True:
            try:
                self._commit(connection, batch, price_ids)
            except _BAD_ROW as error:
                if len(batch) == 1:
                    log.error("usage_row_refused", row=repr(batch[0]), reason=str(error))
                    return True
                # One bad row must not block the others, so write them one by one.
                return all(self._write(connection, [row], price_ids) for row in batch)
            except sqlite3.Error as error:
                if tries in (0, 10, 100) or tries % 1000 == 0:
                    log.error("usage_not_written", rows=len(batch), waiting=len(self._rows), reason=str(error))
                if self._closing and tries >= _CLOSE_TRIES:
                    return False
                time.sleep(_RETRY_S[min(tries, len(_RETRY_S) - 1)])
                tries += 1
            else:
                self.written += len(batch)
                return True

    def _commit(self, connection: sqlite3.Connection, batch: Sequence[UsageRow], price_ids: dict[Price, int]) -> None:
        connection.execute("BEGIN IMMEDIATE")
        try:
            rows = [_values(row, self._price_id(connection, row.model, price_ids)) for row in batch]
            _insert(connection, rows)
            connection.execute("COMMIT")
        except (sqlite3.Error, *_BAD_ROW):
            price_ids.clear()  # ids inserted in this transaction were rolled back
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def _price_id(self, connection: sqlite3.Connection, model: str, known: dict[Price, int]) -> int:
        """Return the id of the model's current price. Rows refer to it, so a new price list does not change old rows."""
        price = self._prices.price(model)
        found = known.get(price)
        if found is None:
            values = (price.input, price.cached_input, price.output)
            connection.execute("INSERT OR IGNORE INTO prices (input, cached_input, output) VALUES (?, ?, ?)", values)
            query = "SELECT id FROM prices WHERE input = ? AND cached_input = ? AND output = ?"
            found = known[price] = int(connection.execute(query, values).fetchone()[0])
        return found


def connect(path: Path) -> sqlite3.Connection:
    """Open the ledger for writing; create the file and its tables if needed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=10.0, isolation_level=None)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"meter.path={path}: cannot be opened: {error}") from error
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        if version not in (0, SCHEMA_VERSION):
            raise ConfigError(
                f"meter.path={path}: the ledger has schema version {version}, but this version of stoker needs"
                f" {SCHEMA_VERSION}; use another file"
            )
        if version == 0:
            connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
    except sqlite3.Error as error:
        connection.close()
        raise ConfigError(f"meter.path={path}: not a usable ledger: {error}") from error
    except ConfigError:
        connection.close()
        raise
    return connection


def _insert(connection: sqlite3.Connection, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert many rows per statement. Every statement releases the GIL and contends with the event loop to get it back."""
    at = 0
    while at < len(rows):
        # Powers of two, so that few different statements are prepared.
        count = 1 << min(len(rows) - at, _MAX_ROWS_PER_STATEMENT).bit_length() - 1
        connection.execute(_statement(count), list(chain.from_iterable(rows[at : at + count])))
        at += count


@cache
def _statement(num_rows: int) -> str:
    row = f"({', '.join('?' * _NUM_COLUMNS)})"
    return f"INSERT INTO usage VALUES {', '.join([row] * num_rows)} ON CONFLICT (request_id) DO NOTHING"


def _values(row: UsageRow, price_id: int) -> tuple[Any, ...]:
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
        price_id,
    )

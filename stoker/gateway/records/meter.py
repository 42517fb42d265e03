"""The ledger: one row per admitted request, written ahead at admission and settled at the end.

A request takes a slot in a mapped file beside the ledger (`slot_file.py`) when it is admitted. While the answer streams, its
counts are updated there before the bytes go out. At the end the final row is put in the slot, and a thread of its own copies
settled rows to the store in batches and frees their slots.

Guarantees:

- A row's request id is its primary key, and a batch is one transaction. A batch that is written again after an uncertain
  commit, or a slot that is recovered twice, does not duplicate rows.
- After `kill -9` no admitted request is missing. The next start writes the settled rows as they are. A request that was still
  running is billed for what had been sent, with status 599 (GATEWAY_LOST_STATUS) unless its answer was complete.
- Commits are synced to the disk, the slots are not: a power failure may lose the rows of the last `flush_s` and the requests
  that were running.
- Nothing here waits for the disk on the request path. If the disk is full, slow or fails, rows stay in their slots and the
  batch is retried. When no slot is free, new requests are refused, so that none goes unbilled.
- One gateway uses a ledger. A second one is refused at its start. Readers never wait for the writer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from stoker.base.errors import ConfigError, Overloaded
from stoker.base.log import EventLog
from stoker.gateway.config import MeterSettings
from stoker.gateway.records.prices import Price, PriceList
from stoker.gateway.records.running_usage import RunningUsage, SlotUsage
from stoker.gateway.records.usage_row import UsageHead, UsageRow, head_bytes, recovered_row, tail_bytes
from stoker.gateway.store.slot_file import FoundSlot, SlotFile
from stoker.gateway.store.sqlite import SqliteStore
from stoker.gateway.store.store import Store, StoreRefused, StoreUnavailable, Tables, Transaction

SETTING = "meter.path"
_MAX_TEXT = 256
_RETRY_S = (0.05, 0.2, 1.0, 5.0)
_CLOSE_TRIES = 3

TABLES = Tables(
    "usage",
    2,
    (
        """CREATE TABLE IF NOT EXISTS prices (
            id INTEGER PRIMARY KEY,
            input INTEGER NOT NULL, cached_input INTEGER NOT NULL, output INTEGER NOT NULL,
            UNIQUE (input, cached_input, output)
        )""",
        """CREATE TABLE IF NOT EXISTS usage (
            request_id TEXT PRIMARY KEY,
            time_s REAL NOT NULL,
            key_id TEXT NOT NULL, tenant TEXT NOT NULL, model TEXT NOT NULL, session TEXT,
            worker TEXT NOT NULL, endpoint TEXT NOT NULL, status INTEGER NOT NULL,
            prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
            ttft_ms REAL, e2e_ms REAL NOT NULL, resumed INTEGER NOT NULL,
            x_request_id TEXT NOT NULL,
            price_id INTEGER NOT NULL REFERENCES prices (id),
            misses TEXT NOT NULL DEFAULT ''
        ) WITHOUT ROWID""",
        "CREATE INDEX IF NOT EXISTS usage_by_time ON usage (time_s)",
    ),
)
_NUM_COLUMNS = 18
_MAX_ROWS_PER_STATEMENT = 256

_Batch = Sequence[tuple[int, UsageRow]]  # slots with their rows

log = EventLog("meter")


class NoMeter:
    """Stands in for Meter when metering is disabled."""

    pending = 0
    written = 0
    path: Path | None = None
    store: Store | None = None

    def refusal(self) -> Overloaded | None:
        return None

    def open(self, head: UsageHead) -> RunningUsage:
        return RunningUsage()

    def settle(self, running: RunningUsage, row: UsageRow) -> None:
        pass

    def close(self, timeout_s: float = 30.0) -> None:
        pass


class Meter:
    """Writes usage rows to the ledger in the background."""

    def __init__(self, path: Path, settings: MeterSettings, prices: PriceList) -> None:
        self.path = path
        self._settings = settings
        self._prices = prices
        self._wake = threading.Event()
        self._closing = False
        self._unwritten = 0  # rows in the batch being written
        self.written = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{SETTING}={path}: cannot be opened: {error}") from error
        self._slots = SlotFile(path.with_name(path.name + "-inflight"), settings.max_pending, f"{SETTING}={path}")
        try:
            self.store = SqliteStore(path, SETTING)
            self.store.declare(TABLES)
        except (ConfigError, StoreUnavailable) as error:
            self._slots.close()
            raise ConfigError(error.message) from error
        self.store.close()  # the connection of this thread; the writer has its own
        self._rows: deque[tuple[int, UsageRow]] = deque(self._recovered())
        self._thread = threading.Thread(target=self._run, name="meter", daemon=True)
        self._thread.start()

    def open(self, head: UsageHead) -> RunningUsage:
        """Write a row ahead. Raises Overloaded if no slot is free."""
        try:
            return SlotUsage(self._slots, self._slots.open(head_bytes(head)))
        except IndexError:
            raise self._full() from None

    def settle(self, running: RunningUsage, row: UsageRow) -> None:
        """Put the final row in its slot. From here on it is written to the store, by this process or by the next."""
        assert isinstance(running, SlotUsage)
        self._slots.close_slot(running.index, tail_bytes(row))
        self._rows.append((running.index, row))
        if len(self._rows) == self._settings.flush_rows:
            self._wake.set()

    @property
    def pending(self) -> int:
        return len(self._rows) + self._unwritten

    def refusal(self) -> Overloaded | None:
        """Return the reason to refuse new requests, or None."""
        return None if self._slots.num_free else self._full()

    def _full(self) -> Overloaded:
        message = (
            f"{self.pending} usage rows wait to be written to the ledger and {self._slots.num_used - self.pending} requests"
            " are running, which is as many as meter.max_pending allows, so the gateway accepts no requests; check the"
            " ledger's disk."
        )
        return Overloaded(message, retry_after_s=5.0, code="ledger_behind")

    def close(self, timeout_s: float = 30.0) -> None:
        """Write the remaining rows. After a few failed attempts they stay in their slots for the next start."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        if self.pending:
            log.error(
                "usage_rows_kept", rows=self.pending, path=str(self._slots.path), hint="the next start writes them"
            )
        self._slots.close()

    def _recovered(self) -> list[tuple[int, UsageRow]]:
        """Return the rows that an earlier gateway left in its slots."""
        rows = [(slot.index, row) for slot in self._slots.left_over() if (row := self._row_of(slot)) is not None]
        if self._slots.num_damaged:
            log.error("usage_slots_damaged", slots=self._slots.num_damaged, path=str(self._slots.path))
        if rows:
            log.warning("usage_rows_recovered", rows=len(rows), path=str(self._slots.path))
        return rows

    def _row_of(self, slot: FoundSlot) -> UsageRow | None:
        try:
            return recovered_row(slot)
        except msgspec.MsgspecError:  # the checksum is right, so another version wrote it
            self._slots.num_damaged += 1
            self._slots.free(slot.index)
            return None

    # ---- the writer's thread

    def _run(self) -> None:
        price_ids: dict[Price, int] = {}
        try:
            while True:
                self._wake.wait(self._settings.flush_s)
                self._wake.clear()
                closing = self._closing  # read first, so that all rows settled before close() are written below
                while self._rows:
                    batch = [self._rows.popleft() for _ in range(min(len(self._rows), self._settings.flush_rows))]
                    self._unwritten = len(batch)
                    if not self._write(batch, price_ids):
                        return
                    self._unwritten = 0
                    if len(self._rows) < self._settings.flush_rows and not closing:
                        break  # not a full batch yet, and a commit costs the same for a few rows as for many
                if closing:
                    return
        finally:
            self.store.close()

    def _write(self, batch: _Batch, price_ids: dict[Price, int]) -> bool:
        """Retry until the batch is on disk. Return False if given up because the gateway is stopping."""
        tries = 0
        while True:
            try:
                self._commit(batch, price_ids)
            except StoreRefused as error:
                price_ids.clear()  # ids inserted in this transaction were rolled back
                if len(batch) > 1:
                    # One bad row must not block the others, so write them one by one.
                    return all(self._write([one], price_ids) for one in batch)
                log.error("usage_row_refused", row=repr(batch[0][1]), reason=error.message)
            except StoreUnavailable as error:
                price_ids.clear()
                if tries in (0, 10, 100) or tries % 1000 == 0:
                    log.error("usage_not_written", rows=len(batch), waiting=len(self._rows), reason=error.message)
                if self._closing and tries >= _CLOSE_TRIES:
                    return False
                time.sleep(_RETRY_S[min(tries, len(_RETRY_S) - 1)])
                tries += 1
                continue
            else:
                self.written += len(batch)
            for index, _ in batch:
                self._slots.free(index)
            return True

    def _commit(self, batch: _Batch, price_ids: dict[Price, int]) -> None:
        with self.store.transaction() as changes:
            _insert(changes, [_values(row, self._price_id(changes, row.model, price_ids)) for _, row in batch])

    def _price_id(self, changes: Transaction, model: str, known: dict[Price, int]) -> int:
        """Return the id of the model's current price. Rows refer to it, so a new price list does not change old rows."""
        price = self._prices.price(model)
        found = known.get(price)
        if found is None:
            values = (price.input, price.cached_input, price.output)
            changes.execute(
                "INSERT INTO prices (input, cached_input, output) VALUES (?, ?, ?) ON CONFLICT DO NOTHING", values
            )
            query = "SELECT id FROM prices WHERE input = ? AND cached_input = ? AND output = ?"
            found = known[price] = int(next(iter(changes.execute(query, values)))[0])
        return found


def _insert(changes: Transaction, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert many rows per statement. Every statement releases the GIL and contends with the event loop to get it back."""
    at = 0
    while at < len(rows):
        # Powers of two, so that few different statements are prepared.
        count = 1 << min(len(rows) - at, _MAX_ROWS_PER_STATEMENT).bit_length() - 1
        changes.execute(_statement(count), list(chain.from_iterable(rows[at : at + count])))
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
        row.misses,
    )

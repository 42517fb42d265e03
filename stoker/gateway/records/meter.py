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
- Each process has a slot file of its own: the first of `PATH`, `PATH-1`, … that no other process uses. A process that starts
  also writes the rows in files that ended processes have left.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from stoker.base.errors import ConfigError, Overloaded
from stoker.base.log import EventLog
from stoker.gateway.admission.prices import Price, PriceList
from stoker.gateway.records.record_settings import MeterSettings
from stoker.gateway.records.running_usage import RunningUsage, SlotUsage
from stoker.gateway.records.usage_row import UsageHead, UsageRow, head_bytes, recovered_row, tail_bytes
from stoker.gateway.records.usage_tables import TABLES, insert_usage, price_id, sum_forgotten_sessions
from stoker.gateway.store.limit_tables import LIMIT_TABLES, add_spent
from stoker.gateway.store.slot_file import FoundSlot, SlotFile, SlotFileInUse
from stoker.gateway.store.store import Store, StoreRefused, StoreUnavailable, Transaction

_MAX_PROCESSES = 256  # gateway processes that may share a store on one machine
_RETRY_S = (0.05, 0.2, 1.0, 5.0)
_CLOSE_TRIES = 3
_FORGOTTEN_EVERY_S = 600.0

_SettledRow = tuple[SlotFile, int, UsageRow]  # a row and its slot

log = EventLog("meter")


class NoMeter:
    """Stands in for Meter when metering is disabled."""

    pending = 0
    written = 0
    identity = ""

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

    def __init__(
        self,
        store: Store,
        slots_path: Path,
        settings: MeterSettings,
        prices: PriceList,
        budgets_of: Callable[[UsageRow], Sequence[str]] = lambda row: (),
    ) -> None:
        """Begin to write to the store. `slots_path` itself and with `-1`, `-2`, … are this machine's write-ahead files.

        `budgets_of` returns the names of the budgets that a request is counted in. It is called on the writer's thread.
        """
        self._store = store
        self._budgets_of = budgets_of
        self._settings = settings
        self._prices = prices
        self._wake = threading.Event()
        self._closing = False
        self._unwritten = 0  # rows in the batch being written
        self.written = 0
        self._slots = _own_slots(slots_path, settings.max_pending)
        self._left_files: list[SlotFile] = []
        try:
            store.declare(TABLES)
            store.declare(LIMIT_TABLES)
            self._left_files = _left_slots(slots_path, self._slots)
        except (ConfigError, StoreUnavailable) as error:
            self._slots.close()
            raise ConfigError(error.detail if isinstance(error, StoreUnavailable) else error.message) from error
        self._rows: deque[_SettledRow] = deque()
        for slots in (self._slots, *self._left_files):
            self._rows += _recovered(slots)
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
        self._rows.append((self._slots, running.index, row))
        if len(self._rows) == self._settings.flush_rows:
            self._wake.set()

    @property
    def identity(self) -> str:
        """A name of this process among all that use the store. A process that replaces a killed one has the same."""
        return self._slots.identity

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
            f" store {self._store.name} and its disk."
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
        for slots in (self._slots, *self._left_files):
            slots.close()

    # ---- the writer's thread

    def _run(self) -> None:
        price_ids: dict[Price, int] = {}
        look_at_s = 0.0
        while True:
            if time.monotonic() >= look_at_s:
                look_at_s = time.monotonic() + _FORGOTTEN_EVERY_S
                self._sum_forgotten()
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

    def _sum_forgotten(self) -> None:
        """Complete the sums of sessions with what gateways of an older version have written. A failure is tried again later."""
        has_more = True
        while has_more and not self._closing and len(self._rows) < self._settings.flush_rows:
            try:
                with self._store.transaction() as changes:
                    has_more = sum_forgotten_sessions(changes)
            except Exception as error:  # without this thread, no row would be written any more
                reason = error.detail if isinstance(error, StoreUnavailable) else repr(error)
                log.warning("sessions_not_summed", reason=reason)
                return

    def _write(self, batch: Sequence[_SettledRow], price_ids: dict[Price, int]) -> bool:
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
                log.error("usage_row_refused", row=repr(batch[0][2]), reason=error.detail)
            except Exception as error:  # also an unexpected one: without this thread, no row would be written any more
                price_ids.clear()
                if tries in (0, 10, 100) or tries % 1000 == 0:
                    is_known = isinstance(error, StoreUnavailable)
                    log.error(
                        "usage_not_written",
                        exc_info=not is_known,
                        rows=len(batch),
                        waiting=len(self._rows),
                        reason=error.detail if isinstance(error, StoreUnavailable) else repr(error),
                    )
                if self._closing and tries >= _CLOSE_TRIES:
                    return False
                time.sleep(_RETRY_S[min(tries, len(_RETRY_S) - 1)])
                tries += 1
                continue
            else:
                self.written += len(batch)
            for slots, index, _ in batch:
                slots.free(index)
            return True

    def _commit(self, batch: Sequence[_SettledRow], price_ids: dict[Price, int]) -> None:
        with self._store.transaction() as changes:
            new = insert_usage(changes, [(row, self._price_id(changes, row.model, price_ids)) for _, _, row in batch])
            spent: Counter[str] = Counter()
            for row in new:
                for name in self._budgets_of(row):
                    price = self._prices.price(row.model)
                    spent[name] += price.units(row.prompt_tokens, row.cached_tokens, row.completion_tokens)
            add_spent(changes, spent, time.time())

    def _price_id(self, changes: Transaction, model: str, known: dict[Price, int]) -> int:
        price = self._prices.price(model)
        if price not in known:
            known[price] = price_id(changes, price)
        return known[price]


def _own_slots(path: Path, num_slots: int) -> SlotFile:
    """Return the first slot file that no other process uses."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"store: the folder {path.parent} cannot be created: {error}") from error
    for number in range(_MAX_PROCESSES):
        try:
            return SlotFile(_slot_path(path, number), num_slots, "store")
        except SlotFileInUse:
            continue
    raise ConfigError(f"store: {_MAX_PROCESSES} processes use {path}-N already; stop some")


def _left_slots(path: Path, own: SlotFile) -> list[SlotFile]:
    """Return the slot files that ended processes have left."""
    found = []
    for number in range(_MAX_PROCESSES):
        one = _slot_path(path, number)
        if one != own.path and one.exists():
            with suppress(SlotFileInUse):
                found.append(SlotFile(one, 0, "store"))
    return found


def _slot_path(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}-{number}") if number else path


def _recovered(slots: SlotFile) -> list[_SettledRow]:
    """Return the rows that an earlier process left in its slots."""
    rows: list[_SettledRow] = []
    for slot in slots.left_over():
        if (row := _row_of(slots, slot)) is not None:
            rows.append((slots, slot.index, row))
    if slots.num_damaged:
        log.error("usage_slots_damaged", slots=slots.num_damaged, path=str(slots.path))
    if rows:
        log.warning("usage_rows_recovered", rows=len(rows), path=str(slots.path))
    return rows


def _row_of(slots: SlotFile, slot: FoundSlot) -> UsageRow | None:
    try:
        return recovered_row(slot)
    except msgspec.MsgspecError:  # the checksum is right, so another version wrote it
        slots.num_damaged += 1
        slots.free(slot.index)
        return None

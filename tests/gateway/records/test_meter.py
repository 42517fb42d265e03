"""The ledger: no duplicate rows, none lost at a clean stop, no partial batch after kill -9, and exact sums."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stoker.base.errors import ConfigError, Overloaded
from stoker.gateway.admission.prices import PriceList
from stoker.gateway.key_settings import PriceSettings
from stoker.gateway.records.meter import Meter, NoMeter
from stoker.gateway.records.record_settings import MeterSettings
from stoker.gateway.records.running_usage import STATUS
from stoker.gateway.records.usage_row import UsageHead, UsageRow, head_bytes, tail_bytes
from stoker.gateway.records.usage_tables import TABLES, run_id
from stoker.gateway.store.slot_file import HEAD_BYTES, TAIL_BYTES
from stoker.gateway.store.sqlite import SqliteStore
from stoker.gateway.store.store import Tables

ROW = UsageRow("r", 1000.0, "key", "tenant", "model", "session", "worker", "chat", 200, 100, 60, 7, 12.5, 80.0)
EMPTY = {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0}
FAST = MeterSettings(flush_s=0.01, flush_rows=50)


def row(number: int, **changes: object) -> UsageRow:
    return replace(ROW, request_id=f"r{number}", prompt_tokens=number, **changes)


def head_of(row: UsageRow) -> UsageHead:
    return UsageHead(
        *(row.request_id, row.time_s, row.key_id, row.tenant, row.model, row.session, row.endpoint, row.x_request_id)
    )


def record(meter: Meter | NoMeter, row: UsageRow) -> None:
    """Admit a request and settle it."""
    running = meter.open(head_of(row))
    running.note_worker(row.worker)
    meter.settle(running, row)


def read(path: Path, sql: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.execute(sql))


def open_meter(path: Path, settings: MeterSettings = FAST, prices: PriceList | None = None) -> Meter:
    return Meter(SqliteStore(path), slots_of(path), settings, prices or PriceList())


def slots_of(path: Path) -> Path:
    return path.with_name(path.name + "-inflight")


def test_recorded_rows_are_on_disk_after_close(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "usage.db"
    meter = open_meter(path)
    for number in range(1234):
        record(meter, row(number))
    meter.close()
    assert meter.pending == 0
    assert meter.written == 1234
    assert read(path, "SELECT COUNT(*), SUM(prompt_tokens) FROM usage") == [(1234, sum(range(1234)))]
    everything = read(path, "SELECT * FROM usage WHERE request_id = 'r7'")[0]
    assert everything[:15] == (
        *("r7", 1000.0, "key", "tenant", "model", "session", "worker", "chat", 200, 7, 60, 7, 12.5, 80.0, 0),
    )


@pytest.mark.parametrize("num_rows", [1, 255, 256, 257, 767])
def test_batches_of_any_size_are_written_completely(tmp_path: Path, num_rows: int) -> None:
    meter = open_meter(tmp_path / "usage.db", MeterSettings(flush_s=10.0, flush_rows=1000))
    for number in range(num_rows):
        record(meter, row(number))
    meter.close()
    total = "SELECT COUNT(*), SUM(prompt_tokens) FROM usage"
    assert read(tmp_path / "usage.db", total) == [(num_rows, sum(range(num_rows)))]


def test_rows_recorded_during_a_commit_wait_for_the_next_batch(tmp_path: Path) -> None:
    """Otherwise a busy gateway would commit a few rows at a time, without end."""
    times_s: list[float] = []

    class Trickle(Meter):
        def _write(self, *batch: Any) -> bool:
            times_s.append(time.monotonic())
            if len(times_s) < 4:
                record(self, row(len(times_s)))
            return super()._write(*batch)

    path = tmp_path / "usage.db"
    meter = Trickle(SqliteStore(path), slots_of(path), MeterSettings(flush_s=0.1, flush_rows=100), PriceList())
    record(meter, row(0))
    deadline = time.monotonic() + 30
    while len(times_s) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    meter.close()
    assert read(tmp_path / "usage.db", "SELECT COUNT(*) FROM usage") == [(4,)]
    assert min(later - earlier for earlier, later in pairwise(times_s)) >= 0.1


def test_rows_are_written_without_a_flush(tmp_path: Path) -> None:
    meter = open_meter(tmp_path / "usage.db")
    record(meter, row(1))
    deadline = time.monotonic() + 30
    while meter.written == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert read(tmp_path / "usage.db", "SELECT COUNT(*) FROM usage") == [(1,)]
    meter.close()


def test_a_row_recorded_twice_is_stored_once(tmp_path: Path) -> None:
    for _ in range(2):  # also over a restart
        meter = open_meter(tmp_path / "usage.db")
        for number in (1, 2, 1, 1, 3):
            record(meter, row(number))
        meter.close()
    assert read(tmp_path / "usage.db", "SELECT request_id FROM usage ORDER BY 1") == [("r1",), ("r2",), ("r3",)]


@pytest.mark.parametrize("order", [("a", "b", "c"), ("c", "b", "a"), ("b", "a", "b")])
@pytest.mark.parametrize("is_one_batch", [True, False])
def test_the_prompt_of_an_answer_is_billed_once_for_all_its_runs(
    tmp_path: Path, order: tuple[str, ...], is_one_batch: bool
) -> None:
    """Run "c" ended before it had a prompt. The rows of a killed gateway may come last, or twice."""
    path = tmp_path / "usage.db"
    budget_rows: list[UsageRow] = []

    def budgets_of(one: UsageRow) -> list[str]:
        budget_rows.append(one)
        return []

    answers = ["resp_1", "resp_2"]
    rows = [
        replace(ROW, request_id=run_id(answer, run), **EMPTY if run == "c" else {}, misses="new=40")
        for run in order
        for answer in answers
    ]
    for batch in [rows] if is_one_batch else [[one] for one in rows]:
        meter = Meter(SqliteStore(path), slots_of(path), MeterSettings(flush_s=10.0), PriceList(), budgets_of)
        for one in batch:
            record(meter, one)
        meter.close()
    num_rows = 2 * len(set(order))
    expected = (num_rows, 200, 120, 28)
    sums = "SUM(prompt_tokens), SUM(cached_tokens), SUM(completion_tokens)"
    assert read(path, f"SELECT COUNT(*), {sums} FROM usage") == [expected]
    for table in ("usage_sums", "session_sums"):
        assert read(path, f"SELECT SUM(requests), {sums} FROM {table} WHERE span_s = 3600") == [expected]
    assert sum(one.prompt_tokens for one in budget_rows) == 200
    assert read(path, "SELECT COUNT(*) FROM usage WHERE prompt_tokens > 0 AND misses <> ''") == [(2,)]


def test_a_restart_goes_on(tmp_path: Path) -> None:
    for start in (0, 100, 200):
        meter = open_meter(tmp_path / "usage.db")
        for number in range(start, start + 100):
            record(meter, row(number))
        meter.close()
    assert read(tmp_path / "usage.db", "SELECT COUNT(*), SUM(prompt_tokens) FROM usage") == [(300, sum(range(300)))]


def test_readers_see_whole_batches(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    meter = open_meter(path)
    stop = threading.Event()
    seen: list[int] = []

    def look() -> None:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
            while not stop.is_set():
                seen.append(connection.execute("SELECT COUNT(*) FROM usage").fetchone()[0])

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(3000):
        record(meter, row(number))
        if number % 100 == 0:
            time.sleep(0.005)
    meter.close()
    stop.set()
    reader.join()
    assert seen == sorted(seen)
    assert read(path, "SELECT COUNT(*), SUM(prompt_tokens) FROM usage") == [(3000, sum(range(3000)))]
    open_meter(path).close()  # closing released the lock


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_meter import FAST, head_of, open_meter, record, row
meter = open_meter(Path(sys.argv[1]))
start = int(sys.argv[3])
for number in range(start, start + 10_000_000):
    record(meter, row(number))
    running = meter.open(head_of(row(number + 10_000_000)))
    running.note_worker("w")
    running.update(9, 3, number - start)
    print(number, flush=True)
    if number % 20 == 0:
        while meter.pending > 200:
            pass
    meter.settle(running, row(number + 10_000_000, completion_tokens=number - start))
"""


def test_kill_9_loses_no_settled_row_and_keeps_what_was_running(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    start = 0
    for delay_s in (0.15, 0.31, 0.07):
        here = str(Path(__file__).parent)
        command = [sys.executable, "-c", WRITER, str(path), here, str(start)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            lines = [writer.stdout.readline()]  # it has started
            killer = threading.Timer(delay_s, writer.send_signal, [signal.SIGKILL])
            killer.start()
            lines += writer.stdout.readlines()
            killer.join()
        last = max(int(line) for line in lines if line.endswith("\n"))
        open_meter(path).close()  # the next gateway recovers the rest
        assert read(path, "PRAGMA integrity_check") == [("ok",)]
        found = read(path, "SELECT request_id, status, completion_tokens, worker FROM usage")
        by_number = {int(str(name)[1:]): rest for name, *rest in found}
        assert len(by_number) == len(found)
        for number in range(start, last + 1):
            assert by_number[number] == [200, 7, "worker"]
            status, completion, worker = by_number[number + 10_000_000]
            assert completion == number - start
            # At most the last two were running; the line for the last one may not have been written.
            assert (status, worker) == (200, "worker" if worker == "worker" else "w") or number >= last - 1
            assert status in (200, 599)
        start += 30_000_000


def test_a_failing_disk_loses_no_rows_and_delays_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "usage.db"
    settings = MeterSettings(flush_s=0.01, flush_rows=10, max_pending=100)
    meter = open_meter(path, settings)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # the writer now waits for the lock, as with a hanging disk
        for number in range(100):
            record(meter, row(number))  # would block until the lock is released
        assert meter.refusal() is not None
        with pytest.raises(Overloaded, match=r"meter\.max_pending"):
            meter.open(head_of(row(1000)))
        assert meter.pending >= 90
        other.execute("ROLLBACK")
    meter.close()
    assert meter.refusal() is None
    assert read(path, "SELECT COUNT(*) FROM usage") == [(100,)]


def test_a_row_that_cannot_be_kept_keeps_no_other_out(tmp_path: Path) -> None:
    meter = open_meter(tmp_path / "usage.db", MeterSettings(flush_s=10, flush_rows=100))
    for number in range(5):
        record(meter, row(number))
    record(meter, replace(ROW, request_id="huge", completion_tokens=1 << 63))
    record(meter, replace(ROW, request_id="torn", session="\ud800"))
    record(meter, row(5))
    meter.close()
    assert read(tmp_path / "usage.db", "SELECT COUNT(*) FROM usage") == [(6,)]


def test_rows_keep_the_price_of_their_day(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    for day, price in enumerate((1.0, 2.0, 1.0)):
        meter = open_meter(path, prices=PriceList([PriceSettings("model", price, 4.0, 0.1)]))
        record(meter, row(day))
        record(meter, row(day + 10, model="other"))
        meter.close()
    prices = read(path, "SELECT input, cached_input, output FROM prices ORDER BY input")
    assert prices == [(0, 0, 0), (1_000_000, 100_000, 4_000_000), (2_000_000, 100_000, 4_000_000)]
    used = "SELECT request_id, input FROM usage JOIN prices ON prices.id = price_id WHERE model = 'model' ORDER BY 1"
    assert read(path, used) == [("r0", 1_000_000), ("r1", 2_000_000), ("r2", 1_000_000)]


def test_a_file_that_is_not_a_ledger_is_a_config_error(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but long enough to look like something" * 20)
    with pytest.raises(ConfigError, match=r"store=.*notes.txt.*restore the latest backup"):
        open_meter(text)
    newer = tmp_path / "newer.db"
    with closing(sqlite3.connect(newer)) as connection:
        connection.execute("PRAGMA user_version=99")
    with pytest.raises(ConfigError, match="schema version 99"):
        open_meter(newer)
    with pytest.raises(ConfigError, match="cannot be opened"):
        open_meter(text / "below" / "usage.db")


def test_no_meter_takes_everything() -> None:
    meter = NoMeter()
    record(meter, ROW)
    assert (meter.pending, meter.refusal()) == (0, None)
    meter.close()


class FullDisk(SqliteStore):
    """A store on a disk that is full while `is_full`: SQLite's own limit on the number of pages stops it."""

    is_full = False

    def _writer(self) -> sqlite3.Connection:
        connection = super()._writer()
        num_pages = connection.execute("PRAGMA page_count").fetchone()[0] if self.is_full else 1 << 30
        connection.execute(f"PRAGMA max_page_count={num_pages}")
        return connection


def test_a_full_disk_loses_no_row_not_even_over_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "usage.db"
    settings = MeterSettings(flush_s=0.01, flush_rows=100, max_pending=500)
    meter = Meter(FullDisk(path), slots_of(path), settings, PriceList())
    monkeypatch.setattr(FullDisk, "is_full", True)
    for number in range(500):
        record(meter, row(number, session="s" * 200))
    with pytest.raises(Overloaded, match=r"check the store .*usage.db and its disk"):
        meter.open(head_of(row(500)))
    meter.close(10.0)  # gives up, and the rows stay in their slots
    written = read(path, "SELECT COUNT(*) FROM usage")[0][0]
    assert written < 500
    again = Meter(FullDisk(path), slots_of(path), settings, PriceList())  # the disk is still full
    assert again.refusal() is None or written == 0
    monkeypatch.setattr(FullDisk, "is_full", False)
    again.close()
    assert read(path, "SELECT COUNT(*), SUM(prompt_tokens) FROM usage") == [(500, sum(range(500)))]


def crashed(meter: Meter) -> None:
    """Stop the writer without writing, and release the lock, as the end of a process does."""
    meter._slots.close()
    meter._closing = True
    meter._rows.clear()
    meter._wake.set()
    meter._thread.join()


def test_a_running_request_is_billed_for_what_was_sent_when_the_gateway_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    meter = open_meter(path, MeterSettings(flush_s=10.0))
    for number, status in enumerate((0, 200)):
        running = meter.open(head_of(row(number, session=None)))
        running.note_worker("host:8000")
        running.update(50, 70, 3)
        running.cells[STATUS] = status
        assert (running.prompt_tokens, running.cached_tokens, running.completion_tokens) == (50, 70, 3)
    meter.open(head_of(row(2)))
    crashed(meter)
    open_meter(path).close()
    columns = "status, prompt_tokens, cached_tokens, completion_tokens, worker, session, tenant"
    assert read(path, f"SELECT {columns} FROM usage ORDER BY request_id") == [
        (599, 50, 50, 3, "host:8000", None, "tenant"),
        (200, 50, 50, 3, "host:8000", None, "tenant"),
        (599, 0, 0, 0, "", "session", "tenant"),
    ]


def test_processes_share_a_store_and_a_start_writes_what_ended_ones_left(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    meters = [open_meter(path, MeterSettings(flush_s=10.0, max_pending=64)) for _ in range(3)]
    for number, meter in enumerate(meters):
        record(meter, row(number))
        meter.open(head_of(row(number + 10)))
    crashed(meters[1])
    crashed(meters[2])
    meters.append(open_meter(path))  # takes the second file, and finds the third
    for meter in (meters[0], meters[3]):
        meter.close()
    found = read(path, "SELECT request_id, status FROM usage ORDER BY 1")
    assert found == [("r0", 200), ("r1", 200), ("r11", 599), ("r12", 599), ("r2", 200)]
    open_meter(path).close()  # r10 was open when its gateway stopped
    assert ("r10", 599) in read(path, "SELECT request_id, status FROM usage")


def test_damaged_slots_are_dropped_and_the_others_recovered(tmp_path: Path) -> None:
    """A power failure may leave any mixture of old and new pages; seed 3."""
    path = tmp_path / "usage.db"
    rng = random.Random(3)
    meter = open_meter(path, MeterSettings(flush_s=10.0, max_pending=64))
    for number in range(40):
        running = meter.open(head_of(row(number)))
        running.update(1, 0, 1)
        if number % 2:
            meter._slots.close_slot(number, tail_bytes(row(number)))
    crashed(meter)
    file = path.with_name("usage.db-inflight")
    data = bytearray(file.read_bytes())
    data[4096 + 152 + 20] ^= 0xFF  # the head of slot 0
    tail_at = 4096 + 3 * 1024 + 152 + 8 + 704 + 12
    data[tail_at] ^= 0xFF  # the tail of slot 3, which falls back to its running counts
    for _ in range(300):  # noise in the slots from 20 on
        data[rng.randrange(4096 + 20 * 1024, len(data))] = rng.randrange(256)
    file.write_bytes(data)
    open_meter(path, MeterSettings(flush_s=10.0, max_pending=64)).close()
    found = dict(read(path, "SELECT request_id, status FROM usage"))
    assert "r0" not in found
    assert found["r3"] == 599
    assert {f"r{number}" for number in range(1, 20)} <= set(found)
    assert data[4096 + 152 : 4096 + 152 + 4] == len(head_bytes(head_of(row(0)))).to_bytes(4, "little")  # the layout


def test_texts_of_any_length_fit_a_slot(tmp_path: Path) -> None:
    answer = "resp_" + "0" * 48
    long = UsageHead(
        run_id(answer, "req_" + "1" * 24),
        1.0,
        "k" * 64,
        "t" * 64,
        "m" * 100_000,
        "\U0001f600" * 5000,
        "responses",
        "x" * 128,
    )
    head = head_bytes(long)
    assert len(head) <= HEAD_BYTES
    assert long.request_id.encode() in head  # two runs of an answer are never taken for one
    assert len(tail_bytes(replace(ROW, prompt_tokens=1 << 62, e2e_ms=1e300))) <= TAIL_BYTES


@pytest.mark.parametrize("max_pending", [10, 100])
def test_another_size_of_the_slot_file_loses_no_row(tmp_path: Path, max_pending: int) -> None:
    path = tmp_path / "usage.db"
    meter = open_meter(path, MeterSettings(flush_s=10.0, max_pending=50))
    for number in range(40):
        meter.open(head_of(row(number)))
    crashed(meter)
    open_meter(path, MeterSettings(max_pending=max_pending)).close()
    assert read(path, "SELECT COUNT(*) FROM usage") == [(40,)]


def test_only_the_owner_can_read_the_ledger(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    path.touch(mode=0o644)
    meter = open_meter(path)
    record(meter, row(1))
    until_written = time.monotonic() + 30
    while not meter.written and time.monotonic() < until_written:
        time.sleep(0.01)
    modes = {file.name: oct(file.stat().st_mode & 0o777) for file in tmp_path.iterdir()}
    meter.close()
    assert modes == dict.fromkeys(["usage.db", "usage.db-inflight", "usage.db-shm", "usage.db-wal"], "0o600")


def test_a_ledger_of_the_first_version_is_migrated_with_its_sums(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    store = SqliteStore(path)
    store.declare(Tables("usage", TABLES.migrations[:1]))
    with store.transaction() as changes:
        changes.execute("INSERT INTO prices VALUES (1, 5, 5, 5)")
        for number in range(10):
            values = (
                f"r{number}",
                50_000.0 * number,
                "k",
                "t",
                "m",
                None,
                "w",
                "chat",
                200,
                number,
                0,
                1,
                None,
                1.0,
                0,
                "",
                1,
            )
            changes.execute(f"INSERT INTO usage VALUES ({', '.join('?' * 17)})", values)
    store.close()
    meter = open_meter(path)
    record(meter, row(100, time_s=450_001.0, tenant="t", key_id="k", model="m"))
    meter.close()
    hours = "SELECT COUNT(*), SUM(requests), SUM(prompt_tokens) FROM usage_sums WHERE span_s = "
    assert read(path, hours + "3600") == [(11, 11, 145)]
    assert read(path, hours + "86400") == [(7, 11, 145)]
    sessions = hours.replace("usage_sums", "session_sums")
    assert read(path, sessions + "3600") == [(11, 11, 145)]
    assert read(path, sessions + "86400") == [(7, 11, 145)]
    assert read(path, "SELECT hour_s FROM usage WHERE request_id = 'r9'") == [(450_000,)]

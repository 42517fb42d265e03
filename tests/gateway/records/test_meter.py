"""The ledger: no duplicate rows, none lost at a clean stop, no partial batch after kill -9, and exact sums."""

from __future__ import annotations

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

from stoker.base.errors import ConfigError
from stoker.gateway.config import MeterSettings, PriceSettings
from stoker.gateway.records.meter import Meter, NoMeter, connect
from stoker.gateway.records.prices import PriceList
from stoker.gateway.records.usage_row import UsageRow

ROW = UsageRow("r", 1000.0, "key", "tenant", "model", "session", "worker", "chat", 200, 100, 60, 7, 12.5, 80.0)
FAST = MeterSettings(flush_s=0.01, flush_rows=50)


def row(number: int, **changes: object) -> UsageRow:
    return replace(ROW, request_id=f"r{number}", prompt_tokens=number, **changes)


def read(path: Path, sql: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.execute(sql))


def open_meter(path: Path, settings: MeterSettings = FAST, prices: PriceList | None = None) -> Meter:
    return Meter(path, settings, prices or PriceList())


def test_recorded_rows_are_on_disk_after_close(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "usage.db"
    meter = open_meter(path)
    for number in range(1234):
        meter.record(row(number))
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
        meter.record(row(number))
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
                self.record(row(len(times_s)))
            return super()._write(*batch)

    meter = Trickle(tmp_path / "usage.db", MeterSettings(flush_s=0.1, flush_rows=100), PriceList())
    meter.record(row(0))
    deadline = time.monotonic() + 30
    while len(times_s) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    meter.close()
    assert read(tmp_path / "usage.db", "SELECT COUNT(*) FROM usage") == [(4,)]
    assert min(later - earlier for earlier, later in pairwise(times_s)) >= 0.1


def test_rows_are_written_without_a_flush(tmp_path: Path) -> None:
    meter = open_meter(tmp_path / "usage.db")
    meter.record(row(1))
    deadline = time.monotonic() + 30
    while meter.written == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert read(meter.path, "SELECT COUNT(*) FROM usage") == [(1,)]
    meter.close()


def test_a_row_recorded_twice_is_stored_once(tmp_path: Path) -> None:
    for _ in range(2):  # also over a restart
        meter = open_meter(tmp_path / "usage.db")
        for number in (1, 2, 1, 1, 3):
            meter.record(row(number))
        meter.close()
    assert read(tmp_path / "usage.db", "SELECT request_id FROM usage ORDER BY 1") == [("r1",), ("r2",), ("r3",)]


def test_a_restart_goes_on(tmp_path: Path) -> None:
    for start in (0, 100, 200):
        meter = open_meter(tmp_path / "usage.db")
        for number in range(start, start + 100):
            meter.record(row(number))
        meter.close()
    assert read(tmp_path / "usage.db", "SELECT COUNT(*), SUM(prompt_tokens) FROM usage") == [(300, sum(range(300)))]


def test_two_gateways_may_share_a_file_and_readers_see_whole_batches(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    meters = [open_meter(path), open_meter(path)]
    stop = threading.Event()
    seen: list[int] = []

    def look() -> None:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
            while not stop.is_set():
                seen.append(connection.execute("SELECT COUNT(*) FROM usage").fetchone()[0])

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(3000):
        meters[number % 2].record(row(number))
        if number % 100 == 0:
            time.sleep(0.005)
    for meter in meters:
        meter.close()
    stop.set()
    reader.join()
    assert seen == sorted(seen)
    assert read(path, "SELECT COUNT(*), SUM(prompt_tokens) FROM usage") == [(3000, sum(range(3000)))]


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_meter import FAST, open_meter, row
meter = open_meter(Path(sys.argv[1]))
start, told = int(sys.argv[3]), 0
for number in range(start, start + 10_000_000):
    meter.record(row(number))
    if number % 20 == 0:
        while meter.pending > 200:
            pass
    if meter.written > told:
        told = meter.written
        print(told, flush=True)
"""


def test_kill_9_leaves_whole_batches_and_loses_none_that_was_written(tmp_path: Path) -> None:
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
        told = max(int(line) for line in lines if line.endswith("\n"))
        connect(path).close()  # the next gateway can open it
        assert read(path, "PRAGMA integrity_check") == [("ok",)]
        numbers = [int(str(name)[1:]) for (name,) in read(path, "SELECT request_id FROM usage")]
        mine = sorted(number for number in numbers if number >= start)
        assert len(set(numbers)) == len(numbers)
        # The rows have no gaps: the last batch is there completely or not at all.
        assert mine == list(range(start, start + len(mine)))
        assert len(mine) >= told
        assert read(
            path, "SELECT COUNT(*) FROM usage WHERE prompt_tokens != CAST(substr(request_id, 2) AS INTEGER)"
        ) == [(0,)]
        start += 20_000_000


def test_a_failing_disk_loses_no_rows_and_delays_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "usage.db"
    settings = MeterSettings(flush_s=0.01, flush_rows=10, max_pending=30)
    meter = open_meter(path, settings)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # the writer now waits for the lock, as with a hanging disk
        for number in range(100):
            meter.record(row(number))  # would block until the lock is released
        assert meter.behind
        assert meter.pending >= 90
        other.execute("ROLLBACK")
    meter.close()
    assert not meter.behind
    assert read(path, "SELECT COUNT(*) FROM usage") == [(100,)]


def test_a_row_that_cannot_be_kept_keeps_no_other_out(tmp_path: Path) -> None:
    meter = open_meter(tmp_path / "usage.db", MeterSettings(flush_s=10, flush_rows=100))
    for number in range(5):
        meter.record(row(number))
    meter.record(replace(ROW, request_id="huge", completion_tokens=1 << 70))
    meter.record(replace(ROW, request_id="torn", session="\ud800"))
    meter.record(row(5))
    meter.close()
    assert read(tmp_path / "usage.db", "SELECT COUNT(*) FROM usage") == [(6,)]


def test_rows_keep_the_price_of_their_day(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    for day, price in enumerate((1.0, 2.0, 1.0)):
        meter = open_meter(path, prices=PriceList([PriceSettings("model", price, 4.0, 0.1)]))
        meter.record(row(day))
        meter.record(row(day + 10, model="other"))
        meter.close()
    prices = read(path, "SELECT input, cached_input, output FROM prices ORDER BY input")
    assert prices == [(0, 0, 0), (1_000_000, 100_000, 4_000_000), (2_000_000, 100_000, 4_000_000)]
    used = "SELECT request_id, input FROM usage JOIN prices ON prices.id = price_id WHERE model = 'model' ORDER BY 1"
    assert read(path, used) == [("r0", 1_000_000), ("r1", 2_000_000), ("r2", 1_000_000)]


def test_a_file_that_is_not_a_ledger_is_a_config_error(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but long enough to look like something" * 20)
    with pytest.raises(ConfigError, match=r"meter.path=.*notes.txt"):
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
    meter.record(ROW)
    assert (meter.pending, meter.behind) == (0, False)
    meter.close()

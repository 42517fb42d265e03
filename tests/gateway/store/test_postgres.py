"""A PostgreSQL store that is lost, killed or wrong: rows wait and are written once, and errors say what to do."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gateway.records.test_meter import FAST, head_of, record, row

from bench.support.postgres_server import PostgresServer
from stoker.base.errors import ConfigError, Overloaded
from stoker.gateway.admission.prices import PriceList
from stoker.gateway.records.meter import Meter
from stoker.gateway.records.record_settings import MeterSettings
from stoker.gateway.store.location import StoreLocation, without_password
from stoker.gateway.store.watched import WatchedStore


def until(holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def ids(store: WatchedStore) -> list[str]:
    with store.snapshot() as reader:
        return sorted(name for (name,) in reader.execute("SELECT request_id FROM usage"))


def test_rows_wait_for_a_lost_server_and_are_written_once(
    postgres_server: PostgresServer, postgres_url: str, tmp_path: Path
) -> None:
    store = StoreLocation(postgres_url, tmp_path).open()
    meter = Meter(store, tmp_path / "slots", MeterSettings(flush_s=0.01, flush_rows=7, max_pending=300), PriceList())
    try:
        done = threading.Event()

        def crash() -> None:
            for how in (signal.SIGQUIT, signal.SIGINT):
                time.sleep(0.1)
                postgres_server.stop(how)
                time.sleep(0.1)
                postgres_server.start()
            done.set()

        crasher = threading.Thread(target=crash)
        crasher.start()
        number, refused = 0, 0
        while not done.is_set():
            try:
                record(meter, row(number))
                number += 1
            except Overloaded:
                refused += 1
            time.sleep(0.001)
        crasher.join()
        assert store.num_failures > 0
        until(lambda: meter.pending == 0)
        assert store.trouble is None
        assert ids(store) == sorted(f"r{one}" for one in range(number))
        with store.snapshot() as reader:
            ((requests,),) = reader.execute("SELECT SUM(requests) FROM usage_sums WHERE span_s = 3600")
        assert requests == number
    finally:
        meter.close()
        store.close()


def test_without_its_server_the_bound_refuses_requests_and_health_says_so(
    postgres_server: PostgresServer, postgres_url: str, tmp_path: Path
) -> None:
    store = StoreLocation(postgres_url, tmp_path).open()
    meter = Meter(store, tmp_path / "slots", MeterSettings(flush_s=0.01, flush_rows=5, max_pending=20), PriceList())
    postgres_server.stop()
    try:
        for number in range(20):
            record(meter, row(number))
        with pytest.raises(Overloaded, match=r"check the store postgresql://stoker@127.0.0.1"):
            meter.open(head_of(row(20)))
        until(lambda: store.trouble is not None)
        meter.close(5.0)
        with pytest.raises(ConfigError, match=r"store=postgresql://.*cannot connect: .*check the URL"):
            StoreLocation(postgres_url, tmp_path).open()
    finally:
        postgres_server.start()
    again = Meter(store, tmp_path / "slots", FAST, PriceList())  # the rows were kept in their file
    again.close()
    assert len(ids(store)) == 20
    store.close()


def test_gateways_that_write_the_same_sums_do_not_lose_any(postgres_url: str, tmp_path: Path) -> None:
    stores = [StoreLocation(postgres_url, tmp_path).open() for _ in range(3)]
    meters = [Meter(store, tmp_path / "slots", FAST, PriceList()) for store in stores]

    def write(meter: Meter, first: int) -> None:
        for number in range(first, first + 300):
            record(meter, row(number, model=f"m{number % 5}"))

    threads = [threading.Thread(target=write, args=(meter, 1000 * n)) for n, meter in enumerate(meters)]
    for thread in threads:
        thread.start()
    for thread, meter in zip(threads, meters, strict=True):
        thread.join()
        meter.close()
    assert len(ids(stores[0])) == 900
    with stores[0].snapshot() as reader:
        sums = list(reader.execute("SELECT model, requests, completion_tokens FROM usage_sums WHERE span_s = 86400"))
    assert sorted(sums) == [(f"m{n}", 180, 180 * 7) for n in range(5)]
    assert [store.num_failures for store in stores] == [0, 0, 0]
    for store in stores:
        store.close()


def test_a_missing_package_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, "stoker.gateway.store.postgres", raising=False)
    with pytest.raises(ConfigError, match=r"pip install .*\[postgres\]'"):
        StoreLocation("postgresql://db/x", tmp_path).open()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:secret@db:5432/x", "postgresql://me:***@db:5432/x"),
        ("postgresql://db/x?password=secret&sslmode=require", "postgresql://db/x?password=***&sslmode=require"),
        ("postgresql://me:se@cret@a,b/x", "postgresql://me:***@a,b/x"),
        ("postgresql://[bad", "postgresql://***"),
    ],
)
def test_passwords_are_never_shown(url: str, shown: str, tmp_path: Path) -> None:
    assert without_password(url) == shown

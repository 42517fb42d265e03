"""Old rows are deleted, newer ones and the sums stay."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from test_meter import FAST, record, row

from stoker.gateway.admission.prices import PriceList
from stoker.gateway.records.meter import Meter
from stoker.gateway.records.retention import delete_old
from stoker.gateway.store.audit import AUDIT_TABLES
from stoker.gateway.store.location import StoreLocation
from stoker.gateway.store.store_threads import StoreThreads


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_rows_older_than_the_limit_are_deleted(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue("postgres_url") if kind == "postgres" else str(tmp_path / "store.db")
    store = StoreLocation(url, tmp_path).open()
    meter = Meter(store, tmp_path / "slots", FAST, PriceList())
    for number in range(1200):
        record(meter, row(number, time_s=1000.0 * number))
    meter.close()
    store.declare(AUDIT_TABLES)
    with store.transaction() as changes:
        for name in ("key/a/money", "session/t/1", "session/t/2"):
            changes.execute("INSERT INTO spent VALUES (?, 5, ?)", (name, 900_000.0 if name.endswith("2") else 5.0))
        changes.execute("INSERT INTO billed_prompts VALUES ('resp_1', 5.0), ('resp_2', 900000.0)")
        changes.execute("INSERT INTO audit (time_s, actor, action, target, details) VALUES (1, 'a', 'b', 'c', '{}')")
    threads = StoreThreads(store)
    # Of the sessions, whole hours and days before the limit: 194 hours and 8 days.
    assert asyncio.run(delete_old(threads, 700_000.0)) == 700 + 1 + 1 + 194 + 8 + 1
    threads.close()
    with store.snapshot() as reader:
        assert list(reader.execute("SELECT COUNT(*), MIN(time_s) FROM usage")) == [(500, 700_000.0)]
        assert list(reader.execute("SELECT SUM(requests) FROM usage_sums WHERE span_s = 3600")) == [(1200,)]
        assert list(reader.execute("SELECT MIN(start_s) FROM session_sums WHERE span_s = 3600")) == [(194 * 3600,)]
        assert list(reader.execute("SELECT name FROM billed_prompts")) == [("resp_2",)]
        assert list(reader.execute("SELECT name FROM spent ORDER BY name")) == [("key/a/money",), ("session/t/2",)]
    store.close()

"""GET /v1/usage by session: every page and total is that of the rows, whatever the range, the filters and the page's size."""

from __future__ import annotations

import random
import secrets
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_meter import record
from test_usage import DAY, PRICES

from stoker.base.errors import InvalidRequest
from stoker.gateway.admission.prices import PriceList
from stoker.gateway.records.meter import Meter
from stoker.gateway.records.record_settings import MeterSettings
from stoker.gateway.records.usage_endpoint import parse_query
from stoker.gateway.records.usage_queries import read_usage
from stoker.gateway.records.usage_row import UsageRow
from stoker.gateway.store.location import StoreLocation
from stoker.gateway.store.store import Store

NAMES = {"session": "session", "key": "key_id", "tenant": "tenant", "model": "model"}


def make_rows() -> list[UsageRow]:
    """Sessions of one to many requests, some over midnight, some with a name of several tenants, and requests without one."""
    rng = random.Random(5)
    rows: list[UsageRow] = []
    for number in range(150):
        tenant = rng.choice(["red", "blue"])
        session = rng.choice([None, "", "shared", f"s{number}", f"\u00e9{number}"])
        start_s = rng.uniform(0, 4 * DAY)
        for _ in range(rng.choice([1, 2, 9])):
            time_s = start_s + rng.choice([0, 60, 3600, DAY]) * rng.random()
            key, model = f"{tenant}-{rng.randrange(2)}", rng.choice(["big", "small"])
            counts = (rng.randrange(1000), 0, rng.randrange(1000))
            rows.append(
                UsageRow(f"r{len(rows)}", time_s, key, tenant, model, session, "w", "chat", 200, *counts, 1.0, 2.0)
            )
    return rows


ROWS = make_rows()


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def ledger(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("sessions")
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_server").create_database(f"t{secrets.token_hex(6)}")
    else:
        url = str(folder / "usage.db")
    store = StoreLocation(url, folder).open()
    meter = Meter(store, folder / "inflight", MeterSettings(), PriceList(PRICES))
    for row in ROWS:
        record(meter, row)
    meter.close()
    yield store
    store.close()


def value_of(row: UsageRow, name: str) -> Any:
    return getattr(row, NAMES[name]) or ""


def pages(store: Store, text: str, tenant: str | None) -> tuple[list[tuple[Any, int]], list[int]]:
    """Return the groups of all pages with their requests, and the total of each page."""
    lines: list[tuple[Any, int]] = []
    totals, after = [], ""
    while True:
        query = parse_query(f"{text}{after}".encode(), 5.0 * DAY, tenant)
        page = read_usage(store, query)
        assert len(page.lines) <= query.limit
        lines += [(line.group, line.requests) for line in page.lines]
        totals.append(page.total.requests)
        if page.next_after is None:
            return lines, totals
        assert len(page.lines) == query.limit
        after = f"&after={page.next_after}"


@pytest.mark.parametrize("group_by", ["session", "session,model", "session,key,tenant", "model,session"])
def test_pages_hold_what_the_rows_hold(ledger: Store, group_by: str) -> None:
    rng = random.Random(group_by)
    names = group_by.split(",")
    for _ in range(25):
        spans = [0.01 * DAY, 0.1 * DAY, DAY, 5 * DAY]
        start_s = rng.uniform(-1, 5) * DAY
        end_s = start_s + rng.choice(spans)
        if rng.random() < 0.3:
            start_s, end_s = start_s // 3600 * 3600, end_s // DAY * DAY + DAY
        tenant = rng.choice([None, "red", "blue", "nobody"])
        given = {name: value for name, value in (("key", "red-1"), ("model", "big")) if rng.random() < 0.3}
        if rng.random() < 0.2:
            given["session"] = rng.choice(["shared", ""])
        found = [row for row in ROWS if start_s <= row.time_s < end_s and tenant in (None, row.tenant)]
        found = [row for row in found if all(value_of(row, name) == value for name, value in given.items())]
        expected = Counter(tuple(value_of(row, name) for name in names) for row in found)
        filters = "".join(f"&{name}={value}" for name, value in given.items())
        text = f"start={start_s}&end={end_s}&group_by={group_by}&limit={rng.choice([1, 7, 1000])}{filters}"
        lines, totals = pages(ledger, text, tenant)
        assert lines == sorted(expected.items())
        assert totals == [len(found)] * len(totals)


def test_a_cursor_of_another_query_is_refused(ledger: Store) -> None:
    query = parse_query(b"group_by=session&after=WzFd", 5.0 * DAY, None)  # [1]
    with pytest.raises(InvalidRequest, match="another group_by"):
        read_usage(ledger, query)


def test_requests_that_an_older_gateway_records_are_added(ledger: Store, tmp_path: Path) -> None:
    """Its version may run beside this one during an upgrade, and knows nothing of the sums of sessions."""
    with ledger.transaction() as changes:
        changes.execute("DELETE FROM session_sums")
        changes.execute("UPDATE usage SET in_sessions = 0")  # as its rows have
    assert pages(ledger, f"start=0&end={5 * DAY}&group_by=session&limit=1000", None)[0] == []
    Meter(ledger, tmp_path / "inflight", MeterSettings(), PriceList(PRICES)).close()
    for _ in range(2):  # a row is added once
        expected = Counter((row.session or "",) for row in ROWS)
        assert pages(ledger, f"start=0&end={5 * DAY}&group_by=session&limit=1000", None)[0] == sorted(expected.items())
        Meter(ledger, tmp_path / "inflight", MeterSettings(), PriceList(PRICES)).close()


def test_a_query_that_takes_many_statements_ends_in_time(ledger: Store) -> None:
    query = parse_query(f"start=0&end={5 * DAY}&group_by=session&limit=1".encode(), 5.0 * DAY, None)
    with pytest.raises(InvalidRequest, match="took longer"):
        read_usage(ledger, query, limit_s=0.0)

"""GET /v1/usage: exact sums and costs, and each tenant sees only its own."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import io
import random
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_meter import record

from stoker.base.errors import InvalidRequest, NotFound, Overloaded
from stoker.gateway.admission.api_keys import AdminToken, ApiKeys, Unauthorized
from stoker.gateway.admission.prices import PriceList, in_currency
from stoker.gateway.api.reply import Reply
from stoker.gateway.key_settings import KeySettings, PriceSettings
from stoker.gateway.records.meter import Meter
from stoker.gateway.records.record_settings import MeterSettings
from stoker.gateway.records.usage_endpoint import UsageEndpoint, parse_query
from stoker.gateway.records.usage_queries import read_usage
from stoker.gateway.records.usage_row import UsageRow
from stoker.gateway.store.location import StoreLocation
from stoker.gateway.store.sqlite import SqliteStore
from stoker.gateway.store.store import Store

DAY = 86_400
ADMIN = "the-admin-token-of-tests"
PRICES = [PriceSettings("big", 3.0, 15.0, 0.3), PriceSettings("*", 0.1, 0.4)]


class Asked:
    def __init__(self, query: str = "", key: str | None = None) -> None:
        self.query = query.encode()
        self._key = key

    def header(self, name: bytes) -> bytes | None:
        return f"Bearer {self._key}".encode() if self._key and name == b"authorization" else None


def make_rows(count: int = 500) -> list[UsageRow]:
    rng = random.Random(7)
    rows = []
    for number in range(count):
        prompt = rng.randrange(100_000)
        tenant = rng.choice(["red", "blue"])
        rows.append(
            UsageRow(
                request_id=f"r{number}",
                time_s=rng.uniform(0, 3 * DAY),
                key_id=f"{tenant}-{rng.randrange(2)}",
                tenant=tenant,
                model=rng.choice(["big", "small"]),
                session=rng.choice([None, "s1", "=cmd()"]),
                worker="w",
                endpoint="chat",
                status=200,
                prompt_tokens=prompt,
                cached_tokens=rng.randrange(prompt + 1),
                completion_tokens=rng.randrange(1000),
                ttft_ms=1.0,
                e2e_ms=2.0,
            )
        )
    return rows


ROWS = make_rows()


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def ledger(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("ledger")
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


def usage_of(store: Store | None, keys: ApiKeys | None = None) -> UsageEndpoint:
    if keys is None:
        keys = ApiKeys(
            [
                KeySettings("red-0", hashlib.sha256(b"sk-red").hexdigest(), tenant="red"),
                KeySettings("blue-0", hashlib.sha256(b"sk-blue").hexdigest(), tenant="blue"),
            ]
        )
    return UsageEndpoint(store, keys, AdminToken([ADMIN]), unix_time=lambda: 3.0 * DAY)


def ask(store: Store | None, query: str = "", key: str | None = ADMIN) -> Reply:
    return asyncio.run(usage_of(store).answer(Asked(query, key)))


def ask_json(store: Store, query: str = "", key: str | None = ADMIN) -> Any:
    return msgspec.json.decode(ask(store, query, key).body)


def cost_of(rows: list[UsageRow]) -> Decimal:
    total = Decimal(0)
    for row in rows:
        price = (3, Decimal("0.3"), 15) if row.model == "big" else (Decimal("0.1"), Decimal("0.1"), Decimal("0.4"))
        uncached = row.prompt_tokens - row.cached_tokens
        total += uncached * price[0] + row.cached_tokens * price[1] + row.completion_tokens * price[2]
    return total / 1_000_000


def test_the_total_is_the_sum_of_all_rows_to_the_last_token_and_cent(ledger: Store) -> None:
    total = ask_json(ledger)["total"]
    assert total["requests"] == len(ROWS)
    assert total["prompt_tokens"] == sum(row.prompt_tokens for row in ROWS)
    assert total["cached_tokens"] == sum(row.cached_tokens for row in ROWS)
    assert total["uncached_tokens"] == total["prompt_tokens"] - total["cached_tokens"]
    assert total["completion_tokens"] == sum(row.completion_tokens for row in ROWS)
    assert Decimal(total["cost"]) == cost_of(ROWS)


@pytest.mark.parametrize("group_by", ["key", "tenant", "model", "session", "day", "hour", "tenant,model,day"])
def test_every_grouping_adds_up_to_the_total(ledger: Store, group_by: str) -> None:
    answer = ask_json(ledger, f"group_by={group_by}")
    assert answer["group_by"] == group_by.split(",")
    for name in ("requests", "prompt_tokens", "cached_tokens", "completion_tokens"):
        assert sum(line[name] for line in answer["data"]) == answer["total"][name]
    assert sum(Decimal(line["cost"]) for line in answer["data"]) == Decimal(answer["total"]["cost"])
    groups = [tuple(line[name] for name in answer["group_by"]) for line in answer["data"]]
    assert len(set(groups)) == len(groups)


def test_groups_hold_their_own_rows(ledger: Store) -> None:
    answer = ask_json(ledger, "group_by=tenant,day")
    assert len(answer["data"]) == 6
    for line in answer["data"]:
        day = ["1970-01-01", "1970-01-02", "1970-01-03"].index(line["day"])
        mine = [row for row in ROWS if row.tenant == line["tenant"] and int(row.time_s // DAY) == day]
        assert line["requests"] == len(mine)
        assert Decimal(line["cost"]) == cost_of(mine)


@pytest.mark.parametrize(
    "query",
    [
        f"start={DAY}&end={2 * DAY}",
        "start=1970-01-02&end=1970-01-03T00:00:00Z",
        "start=1970-01-02T01:00:00+01:00&end=172800",
    ],
)
def test_time_ranges_are_from_and_until(ledger: Store, query: str) -> None:
    mine = [row for row in ROWS if DAY <= row.time_s < 2 * DAY]
    assert ask_json(ledger, query)["total"]["requests"] == len(mine)


def test_a_key_sees_its_tenant_and_no_other(ledger: Store) -> None:
    answer = ask_json(ledger, "group_by=tenant", key="sk-red")
    assert [line["tenant"] for line in answer["data"]] == ["red"]
    assert answer["total"]["requests"] == sum(row.tenant == "red" for row in ROWS)
    with pytest.raises(InvalidRequest, match="cannot read other tenants"):
        ask(ledger, "tenant=blue", key="sk-red")
    with pytest.raises(Unauthorized):
        ask(ledger, key="sk-unknown")
    with pytest.raises(Unauthorized):
        ask(ledger, key=None)


def test_filters(ledger: Store) -> None:
    mine = [row for row in ROWS if row.tenant == "blue" and row.model == "big" and row.session == "s1"]
    assert ask_json(ledger, "tenant=blue&model=big&session=s1")["total"]["requests"] == len(mine)


def test_csv(ledger: Store) -> None:
    reply = ask(ledger, "group_by=tenant,session&format=csv")
    assert reply.status == 200
    assert dict(reply.headers)[b"content-type"].startswith(b"text/csv")
    lines = list(csv.DictReader(io.StringIO(reply.body.decode())))
    assert sum(int(line["requests"]) for line in lines) == len(ROWS)
    assert sum(Decimal(line["cost"]) for line in lines) == cost_of(ROWS)
    assert "'=cmd()" in {line["session"] for line in lines}


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("group_by=colour", "group_by"),
        ("group_by=day,day", "group_by"),
        ("start=yesterday", "start"),
        ("start=10&end=5", "start"),
        ("format=xml", "format"),
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=9" + "9" * 5000, "limit"),
        ("limit=00000001000000", "limit"),
        ("after=x", "after"),
        ("after=WyJhIl0=", "after"),
        ("group_by=tenant&after=WzFd", "after"),
        ("start=nan", "start"),
        ("end=1e400", "end"),
        ("group_by=tenant;DROP", "group_by"),
    ],
)
def test_wrong_queries_name_their_field(ledger: Store, query: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ask(ledger, query)
    assert refused.value.param == param


@pytest.mark.parametrize("limit", [1, 7, 1000])
def test_pages_hold_every_group_once_and_the_whole_total(ledger: Store, limit: int) -> None:
    query = f"group_by=session,hour&limit={limit}"
    lines: list[Any] = []
    after = ""
    while True:
        page = ask_json(ledger, query + after)
        assert len(page["data"]) <= limit
        assert page["total"]["requests"] == len(ROWS)
        lines += page["data"]
        assert page["has_more"] == (page["next_after"] is not None)
        if not page["has_more"]:
            break
        after = f"&after={page['next_after']}"
        reply = ask(ledger, f"{query}{after}&format=csv")
        assert len(reply.body.splitlines()) <= limit + 1
    groups = [(line["session"], line["hour"]) for line in lines]
    assert len(groups) > 100
    assert groups == sorted(set(groups))
    assert sum(line["requests"] for line in lines) == len(ROWS)


def test_without_a_limit_a_page_has_a_hundred_lines(ledger: Store) -> None:
    page = ask_json(ledger, "group_by=session,hour")
    assert (len(page["data"]), page["has_more"]) == (100, True)


@pytest.mark.parametrize("group_by", ["", "hour", "day", "tenant,day", "session", "model,status,hour", "key,endpoint"])
def test_sums_of_hours_and_days_agree_with_the_rows(ledger: Store, group_by: str) -> None:
    """The time ranges begin and end inside hours and days; seed 11."""
    rng = random.Random(11)
    for _ in range(12):
        start, end = sorted(rng.uniform(-0.2, 3.4) * DAY for _ in range(2))
        if rng.random() < 0.3:
            start, end = start // 3600 * 3600, end // DAY * DAY
        query = f"start={start}&end={max(start, end)}&group_by={group_by}&limit=1000"
        answer = ask_json(ledger, query)
        mine = [row for row in ROWS if start <= row.time_s < end]
        assert answer["total"]["requests"] == len(mine)
        assert answer["total"]["completion_tokens"] == sum(row.completion_tokens for row in mine)
        assert sum(line["requests"] for line in answer["data"]) == len(mine)


def test_a_long_query_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "long.db"
    store = SqliteStore(path)
    meter = Meter(store, tmp_path / "inflight", MeterSettings(), PriceList(PRICES))
    for row in ROWS:
        record(meter, row)
    meter.close()
    with closing(sqlite3.connect(path)) as connection:
        names = [row[1] for row in connection.execute("PRAGMA table_info(usage)")]
        columns = ", ".join("request_id || '-' || n" if name == "request_id" else name for name in names)
        more = "WITH RECURSIVE more(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM more WHERE n < 20)"
        connection.execute(f"{more} INSERT INTO usage SELECT {columns} FROM usage, more")
        connection.commit()
    query = parse_query(b"group_by=worker,session", 3.0 * DAY, None)  # reads rows
    assert read_usage(store, query).total.requests == 21 * len(ROWS)
    with pytest.raises(InvalidRequest, match="shorter time range") as stopped:
        read_usage(store, query, limit_s=0.0)
    assert stopped.value.code == "query_too_long"
    store.close()


def test_a_tenant_runs_few_queries_at_a_time(ledger: Store) -> None:
    async def main() -> None:
        usage = usage_of(ledger)
        asked = [usage.answer(Asked("", key)) for key in ("sk-red", "sk-red", "sk-red", "sk-blue")]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [isinstance(one, Reply) for one in found] == [True, True, False, True]
        assert isinstance(found[2], Overloaded)
        assert isinstance(await usage.answer(Asked("", "sk-red")), Reply)

    asyncio.run(main())


def test_only_the_admin_token_sees_workers(ledger: Store) -> None:
    assert [line["worker"] for line in ask_json(ledger, "group_by=worker")["data"]] == ["w"]
    with pytest.raises(InvalidRequest, match="admin token"):
        ask(ledger, "group_by=worker", key="sk-red")


def test_a_value_is_never_sql(ledger: Store) -> None:
    assert ask_json(ledger, "tenant=x'%20OR%20'1'='1")["total"]["requests"] == 0
    assert ask_json(ledger)["total"]["requests"] == len(ROWS)


def test_without_a_ledger_usage_is_not_found() -> None:
    with pytest.raises(NotFound):
        ask(None)


def test_without_keys_the_one_tenant_sees_itself(ledger: Store) -> None:
    usage = usage_of(ledger, ApiKeys([]))
    assert msgspec.json.decode(asyncio.run(usage.answer(Asked())).body)["total"]["requests"] == 0


def test_the_default_range_is_the_last_thirty_days() -> None:
    query = parse_query(b"", 100.0 * DAY, None)
    assert (query.start_s, query.end_s) == (70.0 * DAY, 100.0 * DAY)


@pytest.mark.parametrize(
    ("units", "text"),
    [
        (0, "0.00"),
        (1, "0.000000000001"),
        (10**12, "1.00"),
        (1_500_000_000_000, "1.5"),
        (10**25 + 1, "10000000000000.000000000001"),
    ],
)
def test_money_is_written_exactly(units: int, text: str) -> None:
    assert in_currency(units) == text


def test_prices_are_what_was_written() -> None:
    price = PriceList([PriceSettings("m", 0.1, 0.075, 0.0125)]).price("m")
    assert (price.input, price.cached_input, price.output) == (100_000, 12_500, 75_000)
    assert PriceList().price("m").units(10**9, 0, 10**9) == 0

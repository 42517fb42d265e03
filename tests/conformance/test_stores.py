"""The tests that every store must pass: transactions are whole, readers see one state, and a restart keeps it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from stoker.base.errors import ConfigError, Overloaded
from stoker.gateway.store.location import StoreLocation
from stoker.gateway.store.sqlite import SqliteStore
from stoker.gateway.store.store import Store, StoreRefused, StoreTimeout, StoreUnavailable, Tables, Transaction
from stoker.gateway.store.store_threads import StoreThreads
from stoker.gateway.store.watched import WatchedStore

# How each store is opened; a second call with the same folder opens the same data.
STORES: dict[str, Callable[[Path, str], Store]] = {
    "sqlite": lambda folder, url: SqliteStore(folder / "store.db"),
    "postgres": lambda folder, url: StoreLocation(url, folder).open(),
}

COUNTS = Tables("counts", (("CREATE TABLE counts (name TEXT PRIMARY KEY, value INTEGER NOT NULL)",),))
ADD = "INSERT INTO counts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = counts.value + excluded.value"

Open = Callable[[], Store]


@pytest.fixture(params=STORES)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else ""

    stores: list[Store] = []

    def open_store() -> Store:
        store = STORES[request.param](tmp_path, url)
        stores.append(store)
        store.declare(COUNTS)
        return store

    yield open_store
    for store in stores:
        store.close()


def add_all(store: Store, counts: dict[str, int | None], raises: Exception | None = None) -> None:
    with store.transaction() as changes:
        for count in counts.items():
            changes.execute(ADD, count)
        if raises is not None:
            raise raises


def values(store: Store) -> dict[str, int]:
    with store.snapshot() as reader:
        return {str(name): int(value) for name, value in reader.execute("SELECT name, value FROM counts")}


def test_a_committed_transaction_is_there_after_a_restart(opened: Open) -> None:
    store = opened()
    with store.transaction() as changes:
        changes.execute(ADD, ("a", 1))
        changes.execute(ADD, ("a", 2))
    store.close()
    assert values(opened()) == {"a": 3}


def test_a_transaction_that_raises_leaves_nothing(opened: Open) -> None:
    store = opened()
    with pytest.raises(KeyError):
        add_all(store, {"a": 1}, raises=KeyError())
    assert values(store) == {}
    with store.transaction() as changes:
        changes.execute(ADD, ("b", 1))
    assert values(store) == {"b": 1}


def test_values_that_cannot_be_stored_are_refused_and_the_rest_rolled_back(opened: Open) -> None:
    store = opened()
    for bad in (None, 1 << 70):
        with pytest.raises(StoreRefused):
            add_all(store, {"a": 1, "b": bad})
    assert values(store) == {}


def test_a_reader_that_asks_for_an_impossible_value_is_no_failure_of_the_store(opened: Open) -> None:
    """Clients choose what is looked for, such as a session. They must not make the store look unavailable."""
    store = WatchedStore(opened())
    with suppress(StoreRefused), store.snapshot() as reader:
        assert list(reader.execute("SELECT * FROM counts WHERE name = ?", ("a\0b",))) == []
    assert (store.trouble, store.num_failures) == (None, 0)
    assert values(store) == {}


def test_a_snapshot_does_not_change_and_delays_no_writer(opened: Open) -> None:
    store = opened()
    with store.snapshot() as reader:
        assert list(reader.execute("SELECT * FROM counts")) == []
        with store.transaction() as changes:
            changes.execute(ADD, ("a", 1))
        assert list(reader.execute("SELECT * FROM counts")) == []
    assert values(store) == {"a": 1}


def test_threads_add_up(opened: Open) -> None:
    store = opened()

    def add() -> None:
        for _ in range(20):
            with store.transaction() as changes:
                changes.execute(ADD, ("a", 1))
        store.close()

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values(store) == {"a": 80}


def test_migrations_run_once_and_keep_the_rows(opened: Open) -> None:
    store = opened()
    store.declare(COUNTS)  # a second declaration changes nothing
    add_all(store, {"a": 1})
    second = (
        "ALTER TABLE counts ADD COLUMN unit TEXT NOT NULL DEFAULT 's'",
        "CREATE INDEX counts_by_unit ON counts (unit)",
    )
    newer = Tables("counts", (*COUNTS.migrations, second))
    store.declare(newer)
    store.declare(newer)
    with store.snapshot() as reader:
        assert list(reader.execute("SELECT name, value, unit FROM counts")) == [("a", 1, "s")]
    with pytest.raises(
        ConfigError, match="schema version 2, but this version of stoker knows 1; run the newer version"
    ):
        store.declare(COUNTS)
    store.close()


def test_a_migration_that_fails_leaves_the_tables_as_they_were(opened: Open) -> None:
    store = opened()
    add_all(store, {"a": 1})
    wrong = ("ALTER TABLE counts ADD COLUMN unit TEXT", "ALTER TABLE missing ADD COLUMN unit TEXT")
    with pytest.raises((StoreUnavailable, StoreRefused)):
        store.declare(Tables("counts", (*COUNTS.migrations, wrong)))
    store.declare(COUNTS)
    with store.snapshot() as reader:
        assert [len(row) for row in reader.execute("SELECT * FROM counts")] == [2]
    store.close()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            "DROP TABLE counts",
            "damaged: the table 'counts' is missing; stop all gateways and restore the latest backup",
        ),
        ("UPDATE store_tables SET version = 0", "no valid schema version \\(0\\); stop all gateways and restore"),
        ("DELETE FROM store_tables", "a table 'counts' that Stoker has not made; give the store a database of its own"),
    ],
)
def test_damaged_and_foreign_tables_are_refused_with_what_to_do(opened: Open, damage: str, message: str) -> None:
    store = opened()
    with store.transaction() as changes:
        changes.execute(damage)
    with pytest.raises(ConfigError, match=message):
        store.declare(COUNTS)


def test_a_long_snapshot_is_stopped(opened: Open) -> None:
    store = opened()
    add_all(store, {f"n{number}": number for number in range(300)})
    slow = "SELECT COUNT(*) FROM counts a, counts b, counts c, counts d WHERE a.value + b.value + c.value + d.value = 7"
    with pytest.raises(StoreTimeout), store.snapshot(0.1) as reader:
        list(reader.execute(slow))
    assert len(values(store)) == 300
    store.close()


def test_the_event_loop_goes_on_while_the_store_works(opened: Open) -> None:
    store = opened()
    threads = StoreThreads(store, num_threads=2, max_running=3)
    begun, held = threading.Event(), threading.Event()

    def hold(changes: Transaction) -> int:
        changes.execute(ADD, ("a", 1))
        begun.set()
        held.wait(30)
        return 7

    async def main() -> None:
        first = asyncio.create_task(threads.write(hold, 30.0))
        assert await asyncio.to_thread(begun.wait, 30)
        late = asyncio.create_task(threads.write(lambda changes: list(changes.execute(ADD, ("a", 1))), 0.05))
        with pytest.raises(StoreUnavailable) as unavailable:
            await late
        assert "no answer within" in unavailable.value.detail
        assert store.name not in unavailable.value.message  # clients see it
        assert await threads.read(lambda reader: list(reader.execute("SELECT * FROM counts"))) == []
        third = asyncio.create_task(threads.write(hold, 30.0))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="which is the limit"):
            await threads.read(lambda reader: 0)
        held.set()
        assert [await first, await third] == [7, 7]

    asyncio.run(main())
    threads.close()
    assert values(store) == {"a": 3}  # the late one was committed after its caller had left
    store.close()

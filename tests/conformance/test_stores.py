"""The tests that every store must pass: transactions are whole, readers see one state, and a restart keeps it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.base.errors import ConfigError
from stoker.gateway.store.sqlite import SqliteStore
from stoker.gateway.store.store import Store, StoreRefused, Tables

# How each store is opened; a second call with the same folder opens the same data.
STORES: dict[str, Callable[[Path], Store]] = {"sqlite": lambda folder: SqliteStore(folder / "store.db", "meter.path")}

COUNTS = Tables("counts", 1, ("CREATE TABLE IF NOT EXISTS counts (name TEXT PRIMARY KEY, value INTEGER NOT NULL)",))
ADD = "INSERT INTO counts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = counts.value + excluded.value"

Open = Callable[[], Store]


@pytest.fixture(params=STORES)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    def open_store() -> Store:
        store = STORES[request.param](tmp_path)
        store.declare(COUNTS)
        return store

    return open_store


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


def test_tables_of_another_version_are_a_config_error(opened: Open) -> None:
    opened().declare(COUNTS)  # a second declaration changes nothing
    with pytest.raises(ConfigError, match="schema version 1, but this version of stoker needs 2"):
        opened().declare(Tables("counts", 2, COUNTS.statements))

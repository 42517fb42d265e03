"""The SQLite store and files that are none of its own."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from stoker.base.errors import ConfigError
from stoker.gateway.store.audit import AUDIT_TABLES
from stoker.gateway.store.sqlite import SqliteStore


def test_a_file_that_is_not_a_database_is_refused_and_not_changed(tmp_path: Path) -> None:
    """A wrong path may name any file, such as /etc/hosts, which others must still be able to read."""
    file = tmp_path / "hosts"
    file.write_text("127.0.0.1 localhost\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="not a SQLite file"):
        SqliteStore(file, "store")
    assert file.stat().st_mode & 0o777 == 0o644
    assert file.read_text() == "127.0.0.1 localhost\n"


def test_a_version_that_is_no_number_is_refused(tmp_path: Path) -> None:
    """SQLite keeps any value in a column of numbers."""
    store = SqliteStore(tmp_path / "store.db")
    store.declare(AUDIT_TABLES)
    with store.transaction() as changes:
        changes.execute("UPDATE store_tables SET version = 'abc'")
    with pytest.raises(
        ConfigError, match="no valid schema version \\('abc'\\); stop all gateways and restore the latest"
    ):
        store.declare(AUDIT_TABLES)
    store.close()


def test_a_file_of_another_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "store.db")) as connection:
        connection.execute("PRAGMA user_version = 7")
    with pytest.raises(ConfigError, match=r"schema version 7, but .* needs 1; run the newer version of stoker"):
        SqliteStore(tmp_path / "store.db")

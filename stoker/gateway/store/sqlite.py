"""The store as one SQLite file, for one gateway.

A commit is synced to the disk (WAL, synchronous=FULL), so it survives a power failure. The file, its -wal and its -shm can be
read and written by their owner only.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from stoker.base.errors import ConfigError
from stoker.gateway.store.store import StoreRefused, StoreUnavailable, Tables

FILE_VERSION = 1
_LOCK_S = 10.0
_READ_S = 30.0
_MODE = 0o600
# Errors that a retry cannot fix: numbers beyond 64 bits, invalid Unicode, a missing value.
_REFUSED = (OverflowError, UnicodeError, sqlite3.IntegrityError, sqlite3.InterfaceError)
_VERSIONS = "CREATE TABLE IF NOT EXISTS store_tables (name TEXT PRIMARY KEY, version INTEGER NOT NULL)"


class SqliteTransaction:
    """One transaction on a connection."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def execute(self, sql: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        return self._connection.execute(sql, values)


class SqliteStore:
    """A store in the SQLite file `path`. `setting` names the setting that errors blame."""

    def __init__(self, path: Path, setting: str) -> None:
        self.path = path
        self._setting = setting
        self._writers = threading.local()
        self._writer()  # fail at startup if the file cannot be opened

    def declare(self, tables: Tables) -> None:
        with self.transaction() as changes:
            changes.execute(_VERSIONS)
            query = "SELECT version FROM store_tables WHERE name = ?"
            versions = [int(version) for (version,) in changes.execute(query, (tables.name,))]
            if versions and versions[0] != tables.version:
                raise ConfigError(
                    f"{self._setting}={self.path}: the tables {tables.name!r} have schema version {versions[0]}, but this"
                    f" version of stoker needs {tables.version}; use another file"
                )
            if not versions:
                for statement in tables.statements:
                    changes.execute(statement)
                changes.execute("INSERT INTO store_tables VALUES (?, ?)", (tables.name, tables.version))

    @contextmanager
    def transaction(self) -> Iterator[SqliteTransaction]:
        try:
            connection = self._writer()
        except ConfigError as error:
            raise StoreUnavailable(error.message) from error
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield SqliteTransaction(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except _REFUSED as error:
            raise StoreRefused(f"{self._setting}={self.path}: {error}") from error
        except sqlite3.Error as error:
            raise StoreUnavailable(f"{self._setting}={self.path}: {error}") from error

    @contextmanager
    def snapshot(self) -> Iterator[SqliteTransaction]:
        uri = f"{self.path.absolute().as_uri()}?mode=ro"
        try:
            with closing(sqlite3.connect(uri, uri=True, timeout=_READ_S, isolation_level=None)) as connection:
                connection.execute("BEGIN")
                yield SqliteTransaction(connection)
        except sqlite3.Error as error:
            raise StoreUnavailable(f"{self._setting}={self.path}: {error}") from error

    def close(self) -> None:
        connection: sqlite3.Connection | None = getattr(self._writers, "connection", None)
        if connection is not None:
            connection.close()
            self._writers.connection = None

    def _writer(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._writers, "connection", None)
        if connection is None:
            connection = self._writers.connection = self._open()
        return connection

    def _open(self) -> sqlite3.Connection:
        where = f"{self._setting}={self.path}"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            make_private(self.path)  # SQLite gives the -wal and -shm files the mode of the database file
            connection = sqlite3.connect(self.path, timeout=_LOCK_S, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"{where}: cannot be opened: {error}") from error
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            version = int(connection.execute("PRAGMA user_version").fetchone()[0])
            if version not in (0, FILE_VERSION):
                raise ConfigError(
                    f"{where}: the file has schema version {version}, but this version of stoker needs"
                    f" {FILE_VERSION}; use another file"
                )
            if version == 0:
                connection.execute(f"PRAGMA user_version={FILE_VERSION}")
        except sqlite3.Error as error:
            connection.close()
            raise ConfigError(f"{where}: not a usable SQLite file: {error}") from error
        except ConfigError:
            connection.close()
            raise
        return connection


def make_private(path: Path) -> None:
    """Create the file if it is missing, and let only its owner read and write it, with the files that SQLite adds."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, _MODE))
    for one in (path, *(path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))):
        if one.exists():
            one.chmod(_MODE)

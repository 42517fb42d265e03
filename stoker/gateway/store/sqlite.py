"""The store as one SQLite file, for the gateway processes of one machine.

A commit is synced to the disk (WAL, synchronous=FULL), so it survives a power failure. The file, its -wal and its -shm can be
read and written by their owner only.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stoker.base.errors import ConfigError
from stoker.gateway.store.store import (
    NEWER,
    RESTORE,
    StoreRefused,
    StoreTimeout,
    StoreUnavailable,
    Tables,
    found_version,
    migrate,
)

FILE_VERSION = 1
_LOCK_S = 10.0
_CHECK_S = 2.0  # how long the check for damage may delay the start
_CHECK_STEPS = 10_000  # SQLite instructions between two looks at the clock: a fraction of a millisecond
_MAX_IDLE_READERS = 8
_MODE = 0o600
_HEADER = b"SQLite format 3\0"  # how a database file begins; a new one is empty
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

    def __init__(self, path: Path, setting: str = "store") -> None:
        self.path = path
        self._where = f"{setting}={path}"
        self._lock = threading.Lock()  # writers of this process take turns here, because SQLite's own waits are coarse
        self._connection: sqlite3.Connection | None = None
        self._readers: deque[sqlite3.Connection] = deque()
        self._connection = self._open()  # fail at startup if the file cannot be opened
        self._check()

    @property
    def name(self) -> str:
        return str(self.path)

    def declare(self, tables: Tables) -> None:
        with self.transaction() as changes:
            changes.execute(_VERSIONS)
            present = {str(name) for (name,) in changes.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            migrate(changes, tables, found_version(changes, self._where, tables, present))

    @contextmanager
    def transaction(self) -> Iterator[SqliteTransaction]:
        if not self._lock.acquire(timeout=_LOCK_S):
            raise StoreUnavailable(f"{self._where}: other transactions of this process have run for {_LOCK_S:g} s")
        try:
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
                raise StoreRefused(f"{self._where}: {error}") from error
            except sqlite3.Error as error:
                raise StoreUnavailable(f"{self._where}: {error}") from error
        finally:
            self._lock.release()

    @contextmanager
    def snapshot(self, limit_s: float = 30.0) -> Iterator[SqliteTransaction]:
        deadline_s = time.monotonic() + limit_s
        try:
            connection = self._reader()
            try:
                connection.set_progress_handler(lambda: time.monotonic() > deadline_s, _CHECK_STEPS)
                connection.execute("BEGIN")
                yield SqliteTransaction(connection)
                connection.set_progress_handler(None, 0)
                connection.execute("COMMIT")
            except BaseException:
                connection.close()
                raise
        except sqlite3.Error as error:
            if time.monotonic() > deadline_s:
                raise StoreTimeout(f"The query took longer than {limit_s:g} s and was stopped.") from error
            raise StoreUnavailable(f"{self._where}: {error}") from error
        if len(self._readers) < _MAX_IDLE_READERS:
            self._readers.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        with suppress(IndexError):
            while True:
                self._readers.pop().close()
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _reader(self) -> sqlite3.Connection:
        with suppress(IndexError):
            return self._readers.pop()
        uri = f"{self.path.absolute().as_uri()}?mode=ro"
        return sqlite3.connect(uri, uri=True, timeout=_LOCK_S, isolation_level=None, check_same_thread=False)

    def _writer(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = self._open()
        return self._connection

    def _open(self) -> sqlite3.Connection:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            make_private(self.path)  # SQLite gives the -wal and -shm files the mode of the database file
            connection = sqlite3.connect(self.path, timeout=_LOCK_S, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"{self._where}: cannot be opened: {error}") from error
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            version = int(connection.execute("PRAGMA user_version").fetchone()[0])
            if version not in (0, FILE_VERSION):
                raise ConfigError(
                    f"{self._where}: the file has schema version {version}, but this version of stoker needs"
                    f" {FILE_VERSION}; {NEWER}"
                )
            if version == 0:
                connection.execute(f"PRAGMA user_version={FILE_VERSION}")
        except sqlite3.Error as error:
            connection.close()
            raise ConfigError(f"{self._where}: not a usable SQLite file: {error}; {RESTORE}") from error
        except ConfigError:
            connection.close()
            raise
        return connection

    def _check(self) -> None:
        """Raise ConfigError if the file is damaged. A large file is checked for `_CHECK_S` only."""
        deadline_s = time.monotonic() + _CHECK_S
        connection = self._writer()
        connection.set_progress_handler(lambda: time.monotonic() > deadline_s, _CHECK_STEPS)
        try:
            ((found, *_), *_) = connection.execute("PRAGMA quick_check(1)").fetchall()
        except sqlite3.OperationalError as error:
            if time.monotonic() <= deadline_s:
                raise ConfigError(f"{self._where}: cannot be read: {error}") from error
            found = "ok"
        except sqlite3.DatabaseError as error:
            found = str(error)
        finally:
            connection.set_progress_handler(None, 0)
        if found != "ok":
            connection.close()
            raise ConfigError(f"{self._where}: the database is damaged: {found}; {RESTORE}")


def make_private(path: Path) -> None:
    """Create the file if it is missing, and let only its owner read and write it, with the files that SQLite adds.

    A file that is not a database is not changed: a wrong path may name any file. Raises OSError for it.
    """
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, _MODE)
    try:
        if (begin := os.pread(file, len(_HEADER), 0)) and begin != _HEADER:
            raise OSError("it is not a SQLite file; give another path, or restore the latest backup if it was one")
    finally:
        os.close(file)
    for one in (path, *(path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))):
        if one.exists():
            one.chmod(_MODE)

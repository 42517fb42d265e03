"""The contract of the store: where the gateway keeps what must survive it.

A user of the store declares its tables once (`Tables`) and then runs SQL in transactions. The SQL is the subset that SQLite and
PostgreSQL share, with `?` as the placeholder. Two rules make a schema work in both:

- Column types are TEXT, INTEGER (64 bits), REAL (a double) and BLOB. `id INTEGER PRIMARY KEY` is a number that the store assigns.
  Text is compared by its bytes. `WITHOUT ROWID` is allowed.
- No literal in a statement contains `?` or `%`: pass values as parameters.

On the event loop, use `StoreThreads` (`store_threads.py`), which runs transactions on threads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from stoker.base.errors import ConfigError, InvalidRequest, Overloaded, StokerError

NEWER = "run the newer version of stoker, or restore the backup that was made before the upgrade"
RESTORE = (
    "stop all gateways and restore the latest backup, or give another --store to begin with an empty one"
    " (docs/operations.md, backup)"
)
_CREATED = re.compile(r"\s*CREATE TABLE (\w+)")


class StoreUnavailable(Overloaded):
    """The store cannot work now: its disk is full, it cannot be reached. The same transaction may succeed later.

    `detail` is for the log and for operators: it names the file or server, which clients must not see.
    """

    code = "store_unavailable"

    def __init__(self, detail: str) -> None:
        super().__init__("The gateway's store is not available; retry later.", retry_after_s=5.0)
        self.detail = detail


class StoreRefused(InvalidRequest):
    """The store cannot take these values, and a retry would not change that. `detail` is for the log."""

    code = "store_refused"

    def __init__(self, detail: str) -> None:
        super().__init__("A value of this request cannot be stored: a number is too large, or a text is not valid.")
        self.detail = detail


class StoreTimeout(StokerError):
    """A snapshot took longer than its limit."""

    code = "query_too_long"


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of one user of the store. `migrations[n]` takes them from version n to n + 1; version 0 is empty.

    A migration that was released is never changed: a change of the schema appends a migration. Gateways of the version before
    may still run while one is applied, so it adds tables, columns with defaults and indices, and removes nothing they use.
    """

    name: str
    migrations: tuple[tuple[str, ...], ...]

    @property
    def version(self) -> int:
        return len(self.migrations)

    def names(self, version: int) -> list[str]:
        """Return the tables that there are in this version."""
        statements = (statement for migration in self.migrations[:version] for statement in migration)
        return [found[1] for statement in statements if (found := _CREATED.match(statement))]


class Transaction(Protocol):
    """Statements that take effect together."""

    def execute(self, sql: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """Run one statement and return its result rows."""


class Store(Protocol):
    """Durable tables. Any thread may use it; a transaction belongs to one thread."""

    @property
    def name(self) -> str:
        """The file or URL, without a password, for messages."""

    def declare(self, tables: Tables) -> None:
        """Create the tables or migrate them to this version.

        Raises ConfigError if a newer version of Stoker made them, if some of them are missing or are not Stoker's, and
        StoreUnavailable.
        """

    def transaction(self) -> AbstractContextManager[Transaction]:
        """Begin a transaction that is committed, and on disk, when the block ends, and rolled back if it raises.

        Raises StoreUnavailable or StoreRefused. After StoreUnavailable it is not known whether a commit took place, so a
        transaction that is repeated must be idempotent.
        """

    def snapshot(self, limit_s: float = 30.0) -> AbstractContextManager[Transaction]:
        """Begin to read one consistent state. Readers and writers never wait for each other.

        Raises StoreUnavailable, StoreRefused for a value that no row can have, or StoreTimeout after `limit_s`.
        """

    def close(self) -> None:
        """Close all connections that are not in use."""


def migrate(changes: Transaction, tables: Tables, found: int | None) -> None:
    """Run the migrations that are missing. `found` is the version in the store, None if the tables are new."""
    for migration in tables.migrations[found or 0 :]:
        for statement in migration:
            changes.execute(statement)
    if found is None:
        changes.execute("INSERT INTO store_tables (name, version) VALUES (?, ?)", (tables.name, tables.version))
    else:
        changes.execute("UPDATE store_tables SET version = ? WHERE name = ?", (tables.version, tables.name))


def found_version(changes: Transaction, where: str, tables: Tables, present: set[str]) -> int | None:
    """Return the version of the tables in the store, None if they are new. `present` are the names of all its tables.

    Raises ConfigError, which begins with `where`, if this version of Stoker cannot use them.
    """
    rows = list(changes.execute("SELECT version FROM store_tables WHERE name = ?", (tables.name,)))
    if not rows:
        if foreign := [name for name in tables.names(tables.version) if name in present]:
            raise ConfigError(
                f"{where}: there is a table {foreign[0]!r} that Stoker has not made; give the store a database of its own"
            )
        return None
    ((version,),) = rows
    if not isinstance(version, int) or version < 1:
        raise ConfigError(f"{where}: the tables {tables.name!r} have no valid schema version ({version!r}); {RESTORE}")
    if version > tables.version:
        raise ConfigError(
            f"{where}: the tables {tables.name!r} have schema version {version}, but this version of stoker knows"
            f" {tables.version}; {NEWER}"
        )
    if missing := [name for name in tables.names(version) if name not in present]:
        raise ConfigError(f"{where}: the database is damaged: the table {missing[0]!r} is missing; {RESTORE}")
    return version

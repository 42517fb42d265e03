"""The contract of the store: where the gateway keeps what must survive it.

The usage ledger lies here. A user of the store declares its tables once (`Tables`) and then runs SQL in transactions. The SQL
is the subset that SQLite and PostgreSQL share, with `?` as the placeholder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from stoker.base.errors import StokerError


class StoreUnavailable(StokerError):
    """The store cannot work now: its disk is full, another process holds its lock. The same transaction may succeed later."""

    code = "store_unavailable"


class StoreRefused(StokerError):
    """The store cannot take these values, and a retry would not change that."""

    code = "store_refused"


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of one user of the store. `statements` create whatever is missing, and change nothing that exists."""

    name: str
    version: int
    statements: tuple[str, ...]


class Transaction(Protocol):
    """Statements that take effect together."""

    def execute(self, sql: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """Run one statement and return its result rows."""


class Store(Protocol):
    """Durable tables. Any thread may use it; a transaction belongs to one thread."""

    def declare(self, tables: Tables) -> None:
        """Create the tables that are missing. Raises ConfigError if they exist in another version."""

    def transaction(self) -> AbstractContextManager[Transaction]:
        """Begin a transaction that is committed, and on disk, when the block ends, and rolled back if it raises.

        Raises StoreUnavailable or StoreRefused.
        """

    def snapshot(self) -> AbstractContextManager[Transaction]:
        """Begin to read one consistent state. Readers and the writer never wait for each other."""

    def close(self) -> None:
        """Close the connections of the calling thread."""

"""Reads a gateway's ledger."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LedgerRow:
    request_id: str
    endpoint: str
    status: int
    prompt_tokens: int
    cached_tokens: int
    misses: str


def new_rows(ledger: Path, seen: Collection[str] = ()) -> list[LedgerRow]:
    """Return the rows that are not in `seen`, in the order of their requests."""
    query = "SELECT request_id, endpoint, status, prompt_tokens, cached_tokens, misses FROM usage ORDER BY time_s"
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as connection:
        rows = [LedgerRow(*row) for row in connection.execute(query)]
    return [row for row in rows if row.request_id not in seen]

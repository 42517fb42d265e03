"""The tables of batches and their lines. A line's result is written once, under the lease of the gateway that ran it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import msgspec

from stoker.gateway.objects.file_table import in_pages
from stoker.gateway.objects.line_usage import LineUsage
from stoker.gateway.store.store import Tables, Transaction

BATCH_TABLES = Tables(
    "batches",
    (
        (
            "CREATE TABLE batches (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, key_id TEXT NOT NULL, created_s REAL NOT NULL,"
            " status TEXT NOT NULL, endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL, due_s REAL NOT NULL,"
            " kept_until_s REAL NOT NULL, owner TEXT NOT NULL, lease_s REAL NOT NULL, total INTEGER NOT NULL,"
            " completed INTEGER NOT NULL, failed INTEGER NOT NULL, is_open INTEGER NOT NULL, details BLOB NOT NULL)",
            "CREATE INDEX batches_by_tenant ON batches (tenant, created_s)",
            "CREATE INDEX batches_open ON batches (is_open, created_s)",
            "CREATE INDEX batches_by_expiry ON batches (is_open, kept_until_s)",
            "CREATE TABLE batch_lines (batch_id TEXT NOT NULL, line INTEGER NOT NULL, custom_id TEXT NOT NULL,"
            " state INTEGER NOT NULL, owner TEXT NOT NULL, lease_s REAL NOT NULL, request BLOB, result BLOB,"
            " PRIMARY KEY (batch_id, line))",
            "CREATE INDEX batch_lines_waiting ON batch_lines (batch_id, state, line)",
        ),
        tuple(
            f"ALTER TABLE batches ADD COLUMN {name} INTEGER NOT NULL DEFAULT 0"
            for name in ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
        ),
    ),
)
WAITING, SUCCEEDED, FAILED = 0, 1, 2  # the state of a line
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
_COLUMNS = (
    "id, tenant, key_id, created_s, status, endpoint, input_file_id, due_s, kept_until_s, owner, lease_s, total, completed,"
    " failed, input_tokens, cached_tokens, output_tokens, reasoning_tokens, details"
)
_NAMES = [name.strip() for name in _COLUMNS.split(",")]


class BatchDetails(msgspec.Struct, kw_only=True):
    """What is only shown: times in Unix seconds, files and errors."""

    metadata: dict[str, str] | None = None
    completion_window: str = "24h"
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[dict[str, Any]] = []
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_expires_s: float | None = None


_DETAILS = msgspec.json.Decoder(BatchDetails)  # used on threads, which must not make it at the same time


class StoredBatch(msgspec.Struct, kw_only=True):
    """One row of `batches`. `due_s` is the end of its completion window."""

    id: str
    tenant: str
    key_id: str
    created_s: float
    status: str
    endpoint: str
    input_file_id: str
    due_s: float
    kept_until_s: float
    owner: str = ""
    lease_s: float = 0.0
    total: int = 0
    completed: int = 0
    failed: int = 0
    # of the lines that succeeded
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    details: BatchDetails

    def shown(self) -> dict[str, Any]:
        """Return the batch as clients see it."""
        details = msgspec.to_builtins(self.details)
        errors = details.pop("errors")
        del details["output_expires_s"]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "status": self.status,
            "created_at": int(self.created_s),
            "expires_at": int(self.due_s),
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": {
                "input_tokens": self.input_tokens,
                "input_tokens_details": {"cached_tokens": self.cached_tokens},
                "output_tokens": self.output_tokens,
                "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
                "total_tokens": self.input_tokens + self.output_tokens,
            },
            **details,
        }


class BatchLine(msgspec.Struct):
    """A line that this gateway has claimed."""

    batch_id: str
    line: int  # from 1, as in the file
    custom_id: str
    request: bytes


class LineResult(msgspec.Struct):
    """The line of the output file, and the tokens that the request used."""

    line: BatchLine
    succeeded: bool
    output: bytes
    usage: LineUsage


def insert_batch(changes: Transaction, batch: StoredBatch) -> None:
    values = [getattr(batch, name) for name in _NAMES[:-1]]
    query = f"INSERT INTO batches ({_COLUMNS}, is_open) VALUES ({', '.join('?' * len(_NAMES))}, 1)"
    changes.execute(query, [*values, msgspec.json.encode(batch.details)])


def get_batch(reader: Transaction, tenant: str, batch_id: str) -> StoredBatch | None:
    query = f"SELECT {_COLUMNS} FROM batches WHERE id = ? AND tenant = ?"
    rows = [_batch(row) for row in reader.execute(query, (batch_id, tenant))]
    return rows[0] if rows else None


def list_batches(reader: Transaction, tenant: str, after: StoredBatch | None, limit: int) -> list[StoredBatch]:
    query = f"SELECT {_COLUMNS} FROM batches WHERE tenant = ?"
    return [_batch(row) for row in reader.execute(*in_pages(query, [tenant], after, limit, False))]


def num_open(reader: Transaction, key_id: str) -> int:
    ((count,),) = list(reader.execute("SELECT COUNT(*) FROM batches WHERE is_open = 1 AND key_id = ?", (key_id,)))
    return int(count)


def open_batches(reader: Transaction, limit: int) -> list[StoredBatch]:
    query = f"SELECT {_COLUMNS} FROM batches WHERE is_open = 1 ORDER BY created_s LIMIT ?"
    return [_batch(row) for row in reader.execute(query, (limit,))]


def claim_batch(changes: Transaction, batch_id: str, owner: str, now_s: float, lease_s: float) -> StoredBatch | None:
    """Take or keep the lease on a batch, or return None if another gateway holds it."""
    query = (
        "UPDATE batches SET owner = ?, lease_s = ? WHERE id = ? AND is_open = 1 AND (owner = ? OR lease_s < ?)"
        f" RETURNING {_COLUMNS}"
    )
    rows = [_batch(row) for row in list(changes.execute(query, (owner, lease_s, batch_id, owner, now_s)))]
    return rows[0] if rows else None


def set_status(changes: Transaction, batch: StoredBatch, was: Sequence[str]) -> bool:
    """Write status, total and details of a batch whose status is one of `was`. Return False if it is another one."""
    marks = ", ".join("?" * len(was))
    query = (
        "UPDATE batches SET status = ?, total = ?, details = ?, is_open = ?, lease_s = 0 WHERE id = ?"
        f" AND status IN ({marks}) RETURNING id"
    )
    is_open = int(batch.status not in ENDED)
    values = (batch.status, batch.total, msgspec.json.encode(batch.details), is_open, batch.id, *was)
    return bool(list(changes.execute(query, values)))


# ---- lines


def insert_lines(changes: Transaction, batch_id: str, lines: Sequence[tuple[int, str, bytes]]) -> None:
    query = (
        "INSERT INTO batch_lines (batch_id, line, custom_id, state, owner, lease_s, request, result)"
        " VALUES (?, ?, ?, 0, '', 0, ?, NULL)"
    )
    for line, custom_id, request in lines:
        changes.execute(query, (batch_id, line, custom_id, zlib.compress(request, 1)))


def delete_lines(changes: Transaction, batch_id: str, limit: int) -> int:
    """Delete some lines of a batch, and return how many."""
    query = (
        "DELETE FROM batch_lines WHERE batch_id = ? AND line IN"
        " (SELECT line FROM batch_lines WHERE batch_id = ? ORDER BY line LIMIT ?) RETURNING line"
    )
    return len(list(changes.execute(query, (batch_id, batch_id, limit))))


def claim_lines(
    changes: Transaction, batch_id: str, owner: str, now_s: float, lease_s: float, limit: int
) -> list[BatchLine]:
    """Take lines that wait and that no live gateway runs. The lines of a batch that does not run are left alone."""
    if not list(changes.execute("SELECT 1 FROM batches WHERE id = ? AND status = 'in_progress'", (batch_id,))):
        return []
    query = (
        "UPDATE batch_lines SET owner = ?, lease_s = ? WHERE batch_id = ? AND state = 0 AND lease_s < ? AND line IN"
        " (SELECT line FROM batch_lines WHERE batch_id = ? AND state = 0 AND lease_s < ? ORDER BY line LIMIT ?)"
        " RETURNING line, custom_id, request"
    )
    rows = list(changes.execute(query, (owner, lease_s, batch_id, now_s, batch_id, now_s, limit)))
    return [
        BatchLine(batch_id, int(line), str(custom_id), zlib.decompress(bytes(data))) for line, custom_id, data in rows
    ]


def renew_lines(changes: Transaction, owner: str, lines: Sequence[tuple[str, int]], lease_s: float) -> None:
    """Set the end of the leases on lines of this gateway. 0 gives them back."""
    query = "UPDATE batch_lines SET lease_s = ? WHERE batch_id = ? AND line = ? AND owner = ? AND state = 0"
    for batch_id, line in lines:
        changes.execute(query, (lease_s, batch_id, line, owner))


def end_lines(changes: Transaction, owner: str, results: Sequence[LineResult]) -> None:
    """Write results. A line that this gateway no longer owns, or that has a result, keeps what it has.

    So do the lines of a batch that no longer runs. The batches are locked first, so that none is finalized meanwhile.
    """
    lock = "UPDATE batches SET failed = failed WHERE id = ? AND status = 'in_progress' RETURNING id"
    ids = sorted({result.line.batch_id for result in results})
    running = {one for one in ids if list(changes.execute(lock, (one,)))}
    query = (
        "UPDATE batch_lines SET state = ?, result = ?, request = NULL WHERE batch_id = ? AND line = ? AND owner = ?"
        " AND state = 0 RETURNING line"
    )
    for result in results:
        line, column = result.line, "completed" if result.succeeded else "failed"
        state = SUCCEEDED if result.succeeded else FAILED
        values = (state, zlib.compress(result.output, 1), line.batch_id, line.line, owner)
        if line.batch_id not in running or not list(changes.execute(query, values)):
            continue
        changes.execute(
            f"UPDATE batches SET {column} = {column} + 1, input_tokens = input_tokens + ?,"
            " cached_tokens = cached_tokens + ?, output_tokens = output_tokens + ?,"
            " reasoning_tokens = reasoning_tokens + ? WHERE id = ?",
            (*astuple(result.usage), line.batch_id),
        )


def num_waiting_lines(reader: Transaction, batch_id: str) -> int:
    """Return 1 if a line has no result yet, else 0."""
    query = "SELECT 1 FROM batch_lines WHERE batch_id = ? AND state = 0 LIMIT 1"
    return len(list(reader.execute(query, (batch_id,))))


def results_after(
    reader: Transaction, batch_id: str, state: int, line: int, limit: int
) -> list[tuple[int, str, bytes]]:
    """Return results of a state in the order of their lines. A line that waits has none, and then the result is empty."""
    query = "SELECT line, custom_id, result FROM batch_lines WHERE batch_id = ? AND state = ? AND line > ? ORDER BY line LIMIT ?"
    rows = reader.execute(query, (batch_id, state, line, limit))
    return [(int(at), str(name), b"" if data is None else zlib.decompress(bytes(data))) for at, name, data in rows]


def expire_batches(changes: Transaction, now_s: float, limit: int) -> int:
    """Delete old batches with their lines, or lines of batches that have ended. Return how many rows."""
    query = "SELECT id FROM batches WHERE is_open = 0 AND kept_until_s < ? LIMIT 1"
    for (batch_id,) in list(changes.execute(query, (now_s,))):
        deleted = delete_lines(changes, str(batch_id), limit)
        if deleted < limit:
            changes.execute("DELETE FROM batches WHERE id = ?", (batch_id,))
            deleted += 1
        return deleted
    return 0


def _batch(values: Sequence[Any]) -> StoredBatch:
    table = dict(zip(_NAMES, values, strict=True))
    table["details"] = _DETAILS.decode(bytes(table["details"]))
    return StoredBatch(**table)

"""The tables of files. The content lies in compressed pieces, so that no row is large."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

from stoker.base.errors import StokerError
from stoker.gateway.objects.quota import add_bytes
from stoker.gateway.store.store import Tables, Transaction

FILE_TABLES = Tables(
    "files",
    (
        (
            "CREATE TABLE files (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, purpose TEXT NOT NULL, filename TEXT NOT NULL,"
            " created_s REAL NOT NULL, expires_s REAL NOT NULL, num_bytes INTEGER NOT NULL, stored_bytes INTEGER NOT NULL,"
            " is_complete INTEGER NOT NULL)",
            "CREATE INDEX files_by_tenant ON files (tenant, created_s)",
            "CREATE INDEX files_by_expiry ON files (expires_s)",
            "CREATE TABLE file_pieces (file_id TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL,"
            " PRIMARY KEY (file_id, number))",
        ),
    ),
)
KIND = "files"
PIECE_BYTES = 256 << 10
_HIDDEN_S = 3600.0
_COLUMNS = "id, tenant, purpose, filename, created_s, expires_s, num_bytes, stored_bytes"


class FileIsComplete(StokerError):
    """A piece was written to a file that is complete."""

    code = "file_is_complete"


class StoredFile(msgspec.Struct, kw_only=True):
    """One row of `files`."""

    id: str
    tenant: str
    purpose: str
    filename: str
    created_s: float
    expires_s: float
    num_bytes: int
    stored_bytes: int = 0

    def shown(self) -> dict[str, Any]:
        """Return the file as clients see it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": int(self.created_s),
            "expires_at": int(self.expires_s),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


def put_piece(changes: Transaction, file_id: str, number: int, data: bytes | memoryview) -> int:
    """Store a piece of a file, again if it was stored before. Return its stored size.

    Raises FileIsComplete if the file may not change any more: another gateway has completed it.
    """
    lock = "UPDATE files SET is_complete = 0 WHERE id = ? AND is_complete = 0 RETURNING id"
    if not list(changes.execute(lock, (file_id,))):
        raise FileIsComplete(f"{file_id} is complete, or gone")
    blob = zlib.compress(data, 1)
    query = (
        "INSERT INTO file_pieces (file_id, number, data) VALUES (?, ?, ?)"
        " ON CONFLICT (file_id, number) DO UPDATE SET data = excluded.data"
    )
    changes.execute(query, (file_id, number, blob))
    return len(blob)


def begin_file(changes: Transaction, file: StoredFile) -> None:
    """Add a file that no client sees until `complete_file`. If that never comes, it expires soon."""
    hidden = msgspec.structs.replace(file, stored_bytes=0, expires_s=file.created_s + _HIDDEN_S)
    values = [getattr(hidden, name.strip()) for name in _COLUMNS.split(",")]
    query = (
        f"INSERT INTO files ({_COLUMNS}, is_complete) VALUES ({', '.join('?' * len(values))}, 0)"
        " ON CONFLICT (id) DO UPDATE SET expires_s = excluded.expires_s"
    )
    changes.execute(query, values)


def complete_file(changes: Transaction, file: StoredFile) -> None:
    """Make a file visible whose pieces are stored."""
    query = (
        "UPDATE files SET num_bytes = ?, stored_bytes = ?, expires_s = ?, is_complete = 1"
        " WHERE id = ? AND is_complete = 0 RETURNING id"
    )
    if list(changes.execute(query, (file.num_bytes, file.stored_bytes, file.expires_s, file.id))):
        add_bytes(changes, file.tenant, KIND, file.stored_bytes)


def get_file(reader: Transaction, tenant: str, file_id: str) -> StoredFile | None:
    rows = [
        _file(row)
        for row in reader.execute(
            f"SELECT {_COLUMNS} FROM files WHERE id = ? AND tenant = ? AND is_complete = 1", (file_id, tenant)
        )
    ]
    return rows[0] if rows else None


def piece(reader: Transaction, file_id: str, number: int) -> bytes | None:
    """Return a piece of a file, or None after its last one."""
    rows = list(reader.execute("SELECT data FROM file_pieces WHERE file_id = ? AND number = ?", (file_id, number)))
    return zlib.decompress(bytes(rows[0][0])) if rows else None


def delete_file(changes: Transaction, tenant: str, file_id: str) -> bool:
    query = "DELETE FROM files WHERE id = ? AND tenant = ? RETURNING stored_bytes"
    for (stored_bytes,) in list(changes.execute(query, (file_id, tenant))):
        changes.execute("DELETE FROM file_pieces WHERE file_id = ?", (file_id,))
        add_bytes(changes, tenant, KIND, -int(stored_bytes))
        return True
    return False


def list_files(
    reader: Transaction, tenant: str, purpose: str | None, after: StoredFile | None, limit: int, is_ascending: bool
) -> list[StoredFile]:
    """Return a page of a tenant's files, by the time of their creation."""
    query, values = f"SELECT {_COLUMNS} FROM files WHERE tenant = ? AND is_complete = 1", [tenant]
    if purpose is not None:
        query, values = query + " AND purpose = ?", [*values, purpose]
    return [_file(row) for row in reader.execute(*in_pages(query, values, after, limit, is_ascending))]


def in_pages(query: str, values: list[Any], after: Any, limit: int, is_ascending: bool) -> tuple[str, Sequence[Any]]:
    """Return a query for one page of rows that have `created_s` and `id`."""
    if after is not None:
        query += f" AND (created_s, id) {'>' if is_ascending else '<'} (?, ?)"
        values = [*values, after.created_s, after.id]
    order = "ASC" if is_ascending else "DESC"
    return f"{query} ORDER BY created_s {order}, id {order} LIMIT ?", [*values, limit]


def expire_files(changes: Transaction, now_s: float, limit: int) -> int:
    rows = list(changes.execute("SELECT tenant, id FROM files WHERE expires_s < ? LIMIT ?", (now_s, limit)))
    for tenant, file_id in rows:
        delete_file(changes, str(tenant), str(file_id))
    return len(rows)


def _file(values: Sequence[Any]) -> StoredFile:
    return StoredFile(**dict(zip((name.strip() for name in _COLUMNS.split(",")), values, strict=True)))

"""How many bytes each tenant keeps in the store, by kind of object. The sums change in the transactions that change the objects."""

from __future__ import annotations

from stoker.gateway.store.store import Tables, Transaction

QUOTA_TABLES = Tables(
    "object_bytes",
    (
        (
            "CREATE TABLE object_bytes (tenant TEXT NOT NULL, kind TEXT NOT NULL, num_bytes INTEGER NOT NULL,"
            " PRIMARY KEY (tenant, kind))",
        ),
    ),
)


def add_bytes(changes: Transaction, tenant: str, kind: str, num_bytes: int) -> int:
    """Add to what a tenant keeps, and return the new sum."""
    query = (
        "INSERT INTO object_bytes (tenant, kind, num_bytes) VALUES (?, ?, ?)"
        " ON CONFLICT (tenant, kind) DO UPDATE SET num_bytes = object_bytes.num_bytes + excluded.num_bytes"
        " RETURNING num_bytes"
    )
    ((total,),) = list(changes.execute(query, (tenant, kind, num_bytes)))
    return int(total)

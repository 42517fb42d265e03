"""The audit log: who changed what, when. Admin actions and changes of keys are written here, in the store."""

from __future__ import annotations

import json
import time
from typing import Any

from stoker.gateway.store.store import Tables, Transaction

AUDIT_TABLES = Tables(
    "audit",
    (
        (
            """CREATE TABLE audit (
                id INTEGER PRIMARY KEY,
                time_s REAL NOT NULL, actor TEXT NOT NULL, action TEXT NOT NULL, target TEXT NOT NULL, details TEXT NOT NULL
            )""",
            "CREATE INDEX audit_by_time ON audit (time_s)",
        ),
    ),
)


def audit(changes: Transaction, actor: str, action: str, target: str, **details: Any) -> None:
    """Write one entry. `actor` is the user or the address that acted. Details must not contain secrets."""
    values = (time.time(), actor, action, target, json.dumps(details, default=str))
    changes.execute("INSERT INTO audit (time_s, actor, action, target, details) VALUES (?, ?, ?, ?, ?)", values)


def last_audits(reader: Transaction, count: int) -> list[dict[str, Any]]:
    """Return the latest entries, newest first."""
    query = "SELECT time_s, actor, action, target, details FROM audit ORDER BY id DESC LIMIT ?"
    return [
        {"time_s": time_s, "actor": actor, "action": action, "target": target, **json.loads(details)}
        for time_s, actor, action, target, details in reader.execute(query, (count,))
    ]

"""The table of stored responses, and of the events of those that can be streamed again.

A response holds the items of its own turn. The conversation before it is found by `previous_id`, so a long conversation is not
stored again with each turn. Every function takes the tenant: a response of another tenant is the same as none.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from stoker.gateway.objects.quota import add_bytes
from stoker.gateway.store.store import Tables, Transaction

RESPONSE_TABLES = Tables(
    "responses",
    (
        (
            "CREATE TABLE responses (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, key_id TEXT NOT NULL, created_s REAL NOT NULL,"
            " expires_s REAL NOT NULL, status TEXT NOT NULL, previous_id TEXT, is_background INTEGER NOT NULL,"
            " is_streamed INTEGER NOT NULL, owner TEXT NOT NULL, lease_s REAL NOT NULL, attempts INTEGER NOT NULL,"
            " wants_cancel INTEGER NOT NULL, num_bytes INTEGER NOT NULL, raw_bytes INTEGER NOT NULL,"
            " input BLOB NOT NULL, response BLOB NOT NULL, request BLOB)",
            "CREATE INDEX responses_by_tenant ON responses (tenant, created_s)",
            "CREATE INDEX responses_by_expiry ON responses (expires_s)",
            "CREATE INDEX responses_by_lease ON responses (status, lease_s)",
            "CREATE TABLE response_events (response_id TEXT NOT NULL, first_number INTEGER NOT NULL,"
            " last_number INTEGER NOT NULL, events BLOB NOT NULL, PRIMARY KEY (response_id, first_number))",
        ),
        ("ALTER TABLE response_events ADD COLUMN notes BLOB",),
    ),
)
KIND = "responses"
UNFINISHED = ("queued", "in_progress")
_COLUMNS = (
    "id, tenant, key_id, created_s, expires_s, status, previous_id, is_background, is_streamed, owner, lease_s, attempts,"
    " wants_cancel, num_bytes, raw_bytes, input, response, request"
)


class StoredResponse(msgspec.Struct, kw_only=True):
    """One row. `input`, `response` and `request` are JSON."""

    id: str
    tenant: str
    key_id: str
    created_s: float
    expires_s: float
    status: str
    previous_id: str | None
    is_background: bool = False
    is_streamed: bool = False
    owner: str = ""  # the gateway that runs it, until `lease_s`
    lease_s: float = 0.0
    attempts: int = 1
    wants_cancel: bool = False
    input: bytes
    response: bytes
    request: bytes | None = None  # what is run, until a background response has ended

    @property
    def is_finished(self) -> bool:
        return self.status not in UNFINISHED


def insert(changes: Transaction, row: StoredResponse, max_tenant_bytes: int) -> None:
    """Store a new response. The tenant's oldest finished responses make room for it."""
    blobs = [zlib.compress(row.input, 1), zlib.compress(row.response, 1), row.request and zlib.compress(row.request, 1)]
    num_bytes = sum(len(blob) for blob in blobs if blob)
    values = (
        row.id,
        row.tenant,
        row.key_id,
        row.created_s,
        row.expires_s,
        row.status,
        row.previous_id,
        int(row.is_background),
        int(row.is_streamed),
        row.owner,
        row.lease_s,
        row.attempts,
        0,
        num_bytes,
        len(row.input) + len(row.response),
        *blobs,
    )
    changes.execute(f"INSERT INTO responses ({_COLUMNS}) VALUES ({', '.join('?' * len(values))})", values)
    total = add_bytes(changes, row.tenant, KIND, num_bytes)
    while total > max_tenant_bytes:
        query = "SELECT id FROM responses WHERE tenant = ? AND id <> ? AND lease_s = 0 ORDER BY created_s LIMIT 16"
        oldest = [str(one) for (one,) in changes.execute(query, (row.tenant, row.id))]
        if not oldest:
            return
        for one in oldest:
            total = delete(changes, row.tenant, [one])
            if total <= max_tenant_bytes:
                return


def delete(changes: Transaction, tenant: str, ids: Sequence[str]) -> int:
    """Delete responses of a tenant, and return how many bytes it keeps then."""
    freed = 0
    for one in ids:
        query = "DELETE FROM responses WHERE id = ? AND tenant = ? RETURNING num_bytes"
        for (num_bytes,) in list(changes.execute(query, (one, tenant))):
            freed += int(num_bytes)
            changes.execute("DELETE FROM response_events WHERE response_id = ?", (one,))
    return add_bytes(changes, tenant, KIND, -freed)


def get(reader: Transaction, tenant: str, response_id: str) -> StoredResponse | None:
    query = f"SELECT {_COLUMNS} FROM responses WHERE id = ? AND tenant = ?"
    rows = [_row(values) for values in reader.execute(query, (response_id, tenant))]
    return rows[0] if rows else None


_TURNS = (
    "WITH RECURSIVE turns (id, previous_id, depth) AS ("
    " SELECT id, previous_id, 0 FROM responses WHERE id = ? AND tenant = ?"
    " UNION ALL"
    " SELECT r.id, r.previous_id, turns.depth + 1 FROM responses r JOIN turns ON r.id = turns.previous_id"
    " WHERE r.tenant = ? AND turns.depth < ?)"
)


def chain_bytes(reader: Transaction, tenant: str, response_id: str, max_turns: int) -> int:
    """Return the size of a response and those before it. Compressed, they may be much smaller."""
    query = f"{_TURNS} SELECT COALESCE(SUM(r.raw_bytes), 0) FROM turns JOIN responses r ON r.id = turns.id"
    ((num_bytes,),) = list(reader.execute(query, (response_id, tenant, tenant, max_turns)))
    return int(num_bytes)


def chain(reader: Transaction, tenant: str, response_id: str, max_turns: int) -> list[StoredResponse]:
    """Return a response and those before it, the oldest first. The first one has a `previous_id` if an older one is missing."""
    columns = ", ".join(f"r.{name.strip()}" for name in _COLUMNS.split(","))
    query = f"{_TURNS} SELECT {columns} FROM turns JOIN responses r ON r.id = turns.id ORDER BY turns.depth DESC"
    return [_row(row) for row in reader.execute(query, (response_id, tenant, tenant, max_turns))]


def is_finished(reader: Transaction, tenant: str, response_id: str) -> bool:
    """Return True if a response has ended, or is gone."""
    query = "SELECT status FROM responses WHERE id = ? AND tenant = ?"
    return all(status not in UNFINISHED for (status,) in reader.execute(query, (response_id, tenant)))


def extend(changes: Transaction, tenant: str, ids: Sequence[str], expires_s: float) -> None:
    """Keep the responses of a conversation at least until `expires_s`."""
    query = "UPDATE responses SET expires_s = ? WHERE id = ? AND tenant = ? AND expires_s < ?"
    for one in ids:
        changes.execute(query, (expires_s, one, tenant, expires_s))


# ---- running background responses


def begin(changes: Transaction, response_id: str, owner: str, response: bytes) -> bool:
    """Note that a queued response runs. Return False if this gateway no longer owns it."""
    query = "UPDATE responses SET status = 'in_progress', response = ? WHERE id = ? AND owner = ? AND status IN (?, ?) RETURNING id"
    return bool(list(changes.execute(query, (zlib.compress(response, 1), response_id, owner, *UNFINISHED))))


def finish(changes: Transaction, response_id: str, owner: str, status: str, response: bytes) -> bool:
    """Put the final response in place. Return False if this gateway no longer owns it."""
    blob = zlib.compress(response, 1)
    query = (
        "UPDATE responses SET status = ?, response = ?, request = NULL, lease_s = 0 WHERE id = ? AND owner = ?"
        " AND status IN (?, ?) RETURNING tenant, num_bytes, LENGTH(input)"
    )
    for tenant, before, num_input in list(changes.execute(query, (status, blob, response_id, owner, *UNFINISHED))):
        changes.execute("UPDATE response_events SET notes = NULL WHERE response_id = ?", (response_id,))
        events = "SELECT COALESCE(SUM(LENGTH(events)), 0) FROM response_events WHERE response_id = ?"
        ((num_events,),) = list(changes.execute(events, (response_id,)))
        num_bytes = int(num_input) + len(blob) + int(num_events)
        query = "UPDATE responses SET num_bytes = ?, raw_bytes = raw_bytes + ? WHERE id = ?"
        changes.execute(query, (num_bytes, len(response), response_id))
        add_bytes(changes, str(tenant), KIND, num_bytes - int(before))
        return True
    return False


def add_events(
    changes: Transaction, response_id: str, owner: str, first: int, last: int, events: bytes, notes: bytes = b""
) -> bool:
    """Store events of a running response, and the notes from which another gateway can continue after them.

    Return False if this gateway no longer owns it.
    """
    query = "SELECT 1 FROM responses WHERE id = ? AND owner = ? AND status IN (?, ?)"
    if not list(changes.execute(query, (response_id, owner, *UNFINISHED))):
        return False
    query = "INSERT INTO response_events (response_id, first_number, last_number, events, notes) VALUES (?, ?, ?, ?, ?)"
    changes.execute(query, (response_id, first, last, zlib.compress(events, 1), zlib.compress(notes, 1)))
    return True


def notes_of(reader: Transaction, response_id: str) -> bytes:
    """Return the notes of a stream, from its start to the last stored event."""
    query = "SELECT notes FROM response_events WHERE response_id = ? AND notes IS NOT NULL ORDER BY first_number"
    return b"".join(zlib.decompress(bytes(notes)) for (notes,) in reader.execute(query, (response_id,)))


def events_after(reader: Transaction, response_id: str, number: int) -> list[tuple[int, bytes]]:
    """Return stored events with larger numbers than `number`, in pieces: the last number of a piece, and its events."""
    query = (
        "SELECT last_number, events FROM response_events WHERE response_id = ? AND last_number > ?"
        " ORDER BY first_number LIMIT 16"
    )
    rows = reader.execute(query, (response_id, number))
    return [(int(last), zlib.decompress(bytes(events))) for last, events in rows]


def last_number(reader: Transaction, response_id: str) -> int:
    """Return the number of the last stored event, or -1."""
    query = "SELECT COALESCE(MAX(last_number), -1) FROM response_events WHERE response_id = ?"
    ((number,),) = list(reader.execute(query, (response_id,)))
    return int(number)


def renew(changes: Transaction, owner: str, ids: Sequence[str], lease_s: float) -> list[str]:
    """Set the end of leases of this gateway. Return the ids of the responses that must stop.

    A client wants to cancel or has deleted them, perhaps at another gateway, or another gateway has taken them over.
    """
    query = "UPDATE responses SET lease_s = ? WHERE id = ? AND owner = ? AND lease_s > 0 RETURNING id, wants_cancel"
    rows = [row for one in ids for row in changes.execute(query, (lease_s, one, owner))]
    goes_on = {str(one) for one, wants_cancel in rows if not wants_cancel}
    return [one for one in ids if one not in goes_on]


def take_over(changes: Transaction, owner: str, now_s: float, lease_s: float, limit: int) -> list[StoredResponse]:
    """Claim background responses whose gateway has died."""
    query = "SELECT id, lease_s FROM responses WHERE status IN (?, ?) AND lease_s > 0 AND lease_s < ? LIMIT ?"
    found = list(changes.execute(query, (*UNFINISHED, now_s, limit)))
    taken = []
    for one, seen_s in found:
        query = (
            "UPDATE responses SET owner = ?, lease_s = ?, attempts = attempts + 1 WHERE id = ? AND lease_s = ?"
            f" RETURNING {_COLUMNS}"
        )
        taken += [_row(values) for values in changes.execute(query, (owner, lease_s, one, seen_s))]
    return taken


def want_cancel(changes: Transaction, tenant: str, response_id: str) -> None:
    query = "UPDATE responses SET wants_cancel = 1 WHERE id = ? AND tenant = ? AND status IN (?, ?)"
    changes.execute(query, (response_id, tenant, *UNFINISHED))


def num_unfinished(reader: Transaction, tenant: str) -> int:
    query = "SELECT COUNT(*) FROM responses WHERE status IN (?, ?) AND lease_s > 0 AND tenant = ?"
    ((count,),) = list(reader.execute(query, (*UNFINISHED, tenant)))
    return int(count)


def expire(changes: Transaction, now_s: float, limit: int) -> int:
    """Delete some responses whose time is over. Return how many."""
    query = "SELECT tenant, id FROM responses WHERE expires_s < ? AND lease_s = 0 LIMIT ?"
    rows = list(changes.execute(query, (now_s, limit)))
    for tenant, one in rows:
        delete(changes, str(tenant), [str(one)])
    return len(rows)


def _row(values: Sequence[Any]) -> StoredResponse:
    given: Iterator[Any] = iter(values)
    names = [name.strip() for name in _COLUMNS.split(",")]
    table = dict(zip(names, given, strict=True))
    return StoredResponse(
        id=table["id"],
        tenant=table["tenant"],
        key_id=table["key_id"],
        created_s=table["created_s"],
        expires_s=table["expires_s"],
        status=table["status"],
        previous_id=table["previous_id"],
        is_background=bool(table["is_background"]),
        is_streamed=bool(table["is_streamed"]),
        owner=table["owner"],
        lease_s=table["lease_s"],
        attempts=table["attempts"],
        wants_cancel=bool(table["wants_cancel"]),
        input=zlib.decompress(bytes(table["input"])),
        response=zlib.decompress(bytes(table["response"])),
        request=None if table["request"] is None else zlib.decompress(bytes(table["request"])),
    )

"""API keys in the store: created, listed and revoked while gateways run. Only their hashes are kept.

A key is never deleted: its name stays in the ledger, and a gateway that once had keys must not become open to everyone.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

from stoker.base.errors import ConfigError, NotFound
from stoker.base.settings import from_table
from stoker.gateway.key_settings import KeySettings
from stoker.gateway.store.audit import AUDIT_TABLES, audit
from stoker.gateway.store.store import Store, StoreRefused, Tables, Transaction

KEY_TABLES = Tables(
    "keys",
    (
        (
            """CREATE TABLE api_keys (
                name TEXT PRIMARY KEY, sha256 TEXT NOT NULL UNIQUE, settings TEXT NOT NULL,
                created_s REAL NOT NULL, revoked_s REAL
            )""",
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key as `stoker keys list` shows it."""

    settings: KeySettings
    created_s: float
    revoked_s: float | None


class KeyStore:
    """Reads and changes the keys in a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        store.declare(AUDIT_TABLES)
        store.declare(KEY_TABLES)

    def create(self, key: KeySettings, actor: str) -> None:
        """Add a key. Raises ConfigError if the name is taken."""
        settings = {name: value for name, value in asdict(key).items() if value is not None}
        try:
            with self._store.transaction() as changes:
                changes.execute(
                    "INSERT INTO api_keys (name, sha256, settings, created_s) VALUES (?, ?, ?, ?)",
                    (key.name, key.sha256, json.dumps(settings), time.time()),
                )
                audit(changes, actor, "key_created", key.name, tenant=key.tenant)
        except StoreRefused as error:
            raise ConfigError(
                f"key {key.name!r}: there is, or was, a key of this name in {self._store.name}; choose another name"
            ) from error

    def revoke(self, name: str, actor: str) -> None:
        """Revoke a key. Raises NotFound if there is no such key, or if it is revoked already."""
        with self._store.transaction() as changes:
            query = "UPDATE api_keys SET revoked_s = ? WHERE name = ? AND revoked_s IS NULL RETURNING name"
            if not list(changes.execute(query, (time.time(), name))):
                raise NotFound(f"There is no key {name!r} in {self._store.name} that could be revoked.")
            audit(changes, actor, "key_revoked", name)

    def list(self) -> list[StoredKey]:
        with self._store.snapshot() as reader:
            return read_keys(reader)


def read_keys(reader: Transaction) -> list[StoredKey]:
    """Return all keys, oldest first. Raises ConfigError for one that a newer version of Stoker wrote."""
    rows = reader.execute("SELECT settings, created_s, revoked_s FROM api_keys ORDER BY created_s, name")
    return [StoredKey(_settings(text), created, revoked) for text, created, revoked in rows]


def valid_keys(reader: Transaction) -> tuple[list[KeySettings], list[str]]:
    """Return the keys that are not revoked, and what is wrong with those that a newer version of Stoker wrote.

    Such a key is left out, so that it does not keep others from being created and revoked.
    """
    keys, wrong = list[KeySettings](), list[str]()
    query = "SELECT name, settings FROM api_keys WHERE revoked_s IS NULL ORDER BY created_s, name"
    for name, text in reader.execute(query):
        try:
            keys.append(_settings(text))
        except ConfigError as error:
            wrong.append(f"{name}: {error.message}")
    return keys, wrong


def _settings(text: str) -> KeySettings:
    return from_table(KeySettings, json.loads(text), "key")


def key_counts(reader: Transaction) -> tuple[int, int]:
    """Return the number of keys and of revoked ones, which grow with every change."""
    ((keys, revoked),) = reader.execute("SELECT COUNT(*), COUNT(revoked_s) FROM api_keys")
    return int(keys), int(revoked)

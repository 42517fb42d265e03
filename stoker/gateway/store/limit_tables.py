"""The store's tables of shared limits: what is spent of each budget, and which gateway leases which part of which limit."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.gateway.store.store import Tables, Transaction

LIMIT_TABLES = Tables(
    "limits",
    (
        (
            # A row to lock: gateways that divide the same limit take turns.
            "CREATE TABLE limit_turns (name TEXT PRIMARY KEY, at_s REAL NOT NULL)",
            """CREATE TABLE limit_leases (
                name TEXT NOT NULL, gateway TEXT NOT NULL,
                amount REAL NOT NULL, demand REAL NOT NULL, level REAL NOT NULL,
                at_s REAL NOT NULL, expires_s REAL NOT NULL,
                PRIMARY KEY (name, gateway)
            )""",
            "CREATE INDEX limit_leases_by_time ON limit_leases (expires_s)",
            "CREATE INDEX limit_turns_by_time ON limit_turns (at_s)",
            "CREATE TABLE spent (name TEXT PRIMARY KEY, units INTEGER NOT NULL, at_s REAL NOT NULL)",
            "CREATE INDEX spent_by_time ON spent (at_s)",
        ),
    ),
)


def add_spent(changes: Transaction, units: Mapping[str, int], now_s: float) -> None:
    """Add to what is spent of each budget. In one order, so that gateways cannot wait for each other in a circle."""
    for name in sorted(units):
        changes.execute(
            "INSERT INTO spent (name, units, at_s) VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE"
            " SET units = spent.units + excluded.units, at_s = excluded.at_s",
            (name, units[name], now_s),
        )

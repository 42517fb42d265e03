"""Leases of shared limits: divides each limit in use among the gateways, in one transaction of the store per second.

A limit that is used for the first time is leased before its first request is admitted. If the part that this gateway has is used
up while others may have more, a lease is renewed at once. A lease ends `_LEASE_S` after its gateway was killed.

Without the store, gateways keep the parts that they have. A limit without a lease is then enforced by each gateway on its own,
and a budget without a lease allows nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from stoker.base.errors import Overloaded, StokerError
from stoker.base.long_task import TaskErrors, repeat
from stoker.gateway.admission.budgets import Budget
from stoker.gateway.admission.leased_limits import LeasedLimit, LimitLease, LimitPart, divide
from stoker.gateway.store.limit_tables import LIMIT_TABLES
from stoker.gateway.store.store import StoreRefused, Transaction
from stoker.gateway.store.store_threads import StoreThreads

RENEW_S = 1.0
_LEASE_S = 10.0
_SOONEST_S = 0.05  # the shortest time between two renewals, however many requests ask for one
_FIRST_S = 2.0  # how long a request may wait for the first lease of its limits
_RETRY_S = 2.0  # how long requests do not wait for a store that has failed
_PURGE_S = 600.0
_KEEP_S = 86_400.0
_MAX_LIMITS = 4096  # in use at a time; further ones are enforced by this gateway on its own


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the transaction needs to know of one limit; the limit itself belongs to the event loop."""

    limit: LeasedLimit
    name: str
    demand: float
    level: float
    ends: bool  # the lease is given back


class NoLeases:
    """Stands in for LimitLeases where there is no store: every limit is this gateway's alone."""

    async def ensure(self, limits: Sequence[LeasedLimit], is_short: Callable[[], bool]) -> None:
        pass

    async def close(self) -> None:
        pass


class LimitLeases:
    """Leases the limits that are in use."""

    def __init__(
        self,
        threads: StoreThreads,
        gateway: str,
        clock: Callable[[], float],
        unix_time: Callable[[], float] = time.time,
        errors: TaskErrors | None = None,
    ) -> None:
        """`gateway` names this process among those that share the store; its successor after a kill has the same name."""
        threads.store.declare(LIMIT_TABLES)
        self._threads = threads
        self._gateway = gateway
        self._clock = clock
        self._unix_time = unix_time
        self._errors = errors or TaskErrors()
        self._limits: dict[str, LeasedLimit] = {}
        self._renewing: asyncio.Task[None] | None = None
        self._renewed_s = self._failed_s = -1e9
        self._task: asyncio.Task[None] | None = None
        self._purged_s = -1e9

    async def ensure(self, limits: Sequence[LeasedLimit], is_short: Callable[[], bool]) -> None:
        """LimitLease the limits of a request that are not leased yet, and ask for more where `is_short()` and others have some."""
        now, unix_s = self._clock(), self._unix_time()
        for limit in limits:
            if isinstance(limit, Budget):
                limit.roll(unix_s)
            if not limit.held and len(self._limits) < _MAX_LIMITS:
                limit.touch(now)
                self._limits[limit.name] = limit
        if now - self._failed_s < _RETRY_S:
            self._close_budgets(limits)  # nothing to wait for: the store has just failed
            return
        if self._has_all(limits) and now - self._renewed_s < _LEASE_S / 2:
            shared = any(limit.amount < limit.total for limit in limits)
            if not shared or now - self._renewed_s < _SOONEST_S or not is_short():
                return
        if self._task is None:
            self._task = asyncio.create_task(repeat("limit_leases", self._keep, self._errors))
        try:
            async with asyncio.timeout(_FIRST_S):
                await asyncio.shield(self._renewal())
                if not self._has_all(limits):  # it had begun before these limits were asked for
                    await asyncio.shield(self._renewal())
        except (TimeoutError, Overloaded, StoreRefused):
            self._failed_s = self._clock()
            self._close_budgets(limits)

    def _has_all(self, limits: Sequence[LeasedLimit]) -> bool:
        """Return True if all limits are leased, except those beyond the bound, which never are."""
        return all(limit.held or limit.name not in self._limits for limit in limits)

    def _close_budgets(self, limits: Sequence[LeasedLimit]) -> None:
        """Let budgets without a lease allow nothing. Without the store, other limits are enforced by this gateway alone."""
        for limit in limits:
            if isinstance(limit, Budget) and not limit.held:
                limit.close()

    async def close(self) -> None:
        """Give all leases back."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._renewing is not None:
            await asyncio.gather(self._renewing, return_exceptions=True)
        if self._limits:
            await asyncio.gather(self._renew(ends_all=True), return_exceptions=True)

    def _renewal(self) -> asyncio.Task[None]:
        """Return the renewal that runs, or begin one. A request that joins one late is in the next."""
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew())
        return self._renewing

    async def _keep(self) -> None:
        await asyncio.sleep(RENEW_S)
        if self._limits:
            with suppress(StokerError):  # the next requests see that the store fails
                await asyncio.shield(self._renewal())

    async def _renew(self, ends_all: bool = False) -> None:
        now = self._clock()
        asked = [
            _Asked(limit, name, limit.demand(now), limit.level(now), ends_all or limit.is_idle(now))
            for name, limit in sorted(self._limits.items())
        ]
        purges = now - self._purged_s > _PURGE_S
        parts = await self._threads.write(lambda changes: self._divide(changes, asked, purges))
        now = self._renewed_s = self._clock()
        if purges:
            self._purged_s = now
        for one, part in zip(asked, parts, strict=True):
            limit = one.limit
            if part is None or limit.name != one.name:  # given back, or a budget whose period has ended
                self._limits.pop(one.name, None)
                limit.held = False
            else:
                limit.grant(part.amount, part.level, now)

    def _divide(self, changes: Transaction, asked: Sequence[_Asked], purges: bool) -> list[LimitPart | None]:
        """Divide all limits with the other gateways. Runs on a thread of the store."""
        now_s = self._unix_time()
        parts = [self._divide_one(changes, one, now_s) for one in asked]
        if purges:
            changes.execute("DELETE FROM limit_leases WHERE expires_s < ?", (now_s - _KEEP_S,))
            changes.execute("DELETE FROM limit_turns WHERE at_s < ?", (now_s - _KEEP_S,))
        return parts

    def _divide_one(self, changes: Transaction, one: _Asked, now_s: float) -> LimitPart | None:
        turn = (
            "INSERT INTO limit_turns (name, at_s) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET at_s = excluded.at_s"
        )
        changes.execute(turn, (one.name, now_s))
        query = "SELECT gateway, amount, demand, level, at_s, expires_s FROM limit_leases WHERE name = ?"
        found = [LimitLease(*row) for row in changes.execute(query, (one.name,))]
        if one.ends:
            # The level stays, so that the next gateway does not begin with a full bucket.
            ended = "UPDATE limit_leases SET level = ?, at_s = ?, expires_s = ? WHERE name = ? AND gateway = ?"
            changes.execute(ended, (one.level, now_s, now_s, one.name, self._gateway))
            return None
        spent = 0.0
        if one.limit.spent_name is not None:
            rows = changes.execute("SELECT units FROM spent WHERE name = ?", (one.name,))
            spent = float(sum(units for (units,) in rows))
        part = divide(one.limit, spent, one.demand, found, self._gateway, now_s)
        changes.execute("DELETE FROM limit_leases WHERE name = ? AND expires_s <= ?", (one.name, now_s))
        level = one.level if part.level is None else part.level
        changes.execute(
            "INSERT INTO limit_leases (name, gateway, amount, demand, level, at_s, expires_s) VALUES (?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (name, gateway) DO UPDATE SET amount = excluded.amount, demand = excluded.demand,"
            " level = excluded.level, at_s = excluded.at_s, expires_s = excluded.expires_s",
            (one.name, self._gateway, part.amount, one.demand, level, now_s, now_s + _LEASE_S),
        )
        return part

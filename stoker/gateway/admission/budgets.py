"""Money budgets of API keys and sessions. Pure: the time is an argument. Amounts are in units of 1e-12 of the currency.

What is spent for good is counted in the store, in the transaction that writes the usage rows. A gateway leases a part of what is
left, and its requests may use that part: those that run, with their cost so far, and those whose rows may not be counted yet.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from datetime import UTC, datetime

from stoker.gateway.admission.leased_limits import IDLE_S
from stoker.gateway.admission.rate_limits import Refusal
from stoker.gateway.key_settings import KeySettings

UNITS = 10**12
_PERIODS = {"total": "", "day": "%Y-%m-%d", "month": "%Y-%m"}
_RETRY_S = {"total": 86_400.0, "day": 3600.0, "month": 86_400.0}
_MAX_SESSIONS = 10_000  # of one key, remembered here
_SESSION_BYTES = 72  # a session's name is cut to this length in the write-ahead file


class Budget:
    """The part of a budget that this gateway has. It is a `LeasedLimit`."""

    __slots__ = (
        "_allowed",
        "_before",
        "_now",
        "_prefix",
        "_refused",
        "_running",
        "_used_s",
        "held",
        "name",
        "period",
        "total",
    )

    is_rate = False
    is_whole = False

    def __init__(self, prefix: str, total: float, period: str = "total") -> None:
        self._prefix = prefix
        self.total = float(total)
        self.period = period
        self.name = prefix
        self.held = False
        self._allowed = self.total
        self._running = 0.0  # the cost of running requests so far
        self._now = 0.0  # the cost of requests that ended since the last lease
        self._before = 0.0  # and between the last two: their rows may not be counted yet
        self._refused = False
        self._used_s = -math.inf

    @property
    def spent_name(self) -> str:
        return self.name

    @property
    def amount(self) -> float:
        return self._allowed

    @property
    def used(self) -> float:
        return self._running + self._now + self._before

    def roll(self, unix_s: float) -> None:
        """Begin the period that this moment belongs to."""
        name = period_name(self._prefix, self.period, unix_s)
        if name != self.name:
            self.name, self.held, self._allowed = name, False, self.total
            self._now = self._before = 0.0

    def refusal(self, cost: float, now: float) -> Refusal | None:
        """Return why a request of at least this cost must be refused, or None."""
        if self.used + cost <= self._allowed and self._allowed > 0:
            return None
        self._refused, self._used_s = True, now
        what = "session" if self._prefix.startswith("session/") else "key"
        per = "" if self.period == "total" else f" per {self.period}"
        message = f"The budget of this {what}, {self.total / UNITS:g}{per}, is used up; ask the operator to raise it."
        return Refusal(_RETRY_S[self.period], message)

    def charge(self, cost: float, now: float) -> None:
        """Add to the cost of the running requests."""
        self._running += cost
        self._used_s = now

    def end(self, charged: float, cost: float, now: float) -> None:
        """End a request that was charged `charged` while it ran, and cost `cost`."""
        self._running = max(0.0, self._running - charged)
        self._now += cost
        self._used_s = now

    def demand(self, now: float) -> float:
        more = max(self.used, 0.02 * self.total) if self._refused else 0.0
        self._refused = False
        return self.used + more

    def level(self, now: float) -> float:
        return 0.0

    def grant(self, amount: float, level: float | None, now: float) -> None:
        self.held = True
        self._allowed = amount
        self._before, self._now = self._now, 0.0

    def close(self) -> None:
        """Allow nothing until there is a lease: what other gateways spend is not known."""
        self._allowed = 0.0

    def touch(self, now: float) -> None:
        self._used_s = now

    def is_idle(self, now: float) -> bool:
        return self._running <= 0 and now - self._used_s > IDLE_S


class KeyBudgets:
    """The budgets of one key: its own, and one for each of its sessions."""

    __slots__ = ("_session_units", "_sessions", "_tenant", "own")

    def __init__(self, key: KeySettings | None = None) -> None:
        self.own: tuple[Budget, ...] = ()
        self._session_units: float | None = None
        self._tenant = ""
        self._sessions: OrderedDict[str, Budget] = OrderedDict()
        if key is not None:
            self._tenant = key.tenant
            if key.budget is not None:
                self.own = (Budget(_key_prefix(key.name), key.budget * UNITS, key.budget_period),)
            if key.session_budget is not None:
                self._session_units = key.session_budget * UNITS

    @property
    def limits_sessions(self) -> bool:
        return self._session_units is not None

    def of_session(self, session: str | None) -> tuple[Budget, ...]:
        """Return the session's budget, if the key's sessions have one. A request without a session has none."""
        if self._session_units is None or session is None:
            return ()
        budget = self._sessions.get(session)
        if budget is None:
            budget = Budget(session_name(self._tenant, session), self._session_units)
            self._sessions[session] = budget
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
        else:
            self._sessions.move_to_end(session)
        return (budget,)


def spent_names(key: KeySettings, session: str | None, unix_s: float) -> list[str]:
    """Return the names of the budgets that a request of this key is counted in."""
    names = []
    if key.budget is not None:
        names.append(period_name(_key_prefix(key.name), key.budget_period, unix_s))
    if key.session_budget is not None and session is not None:
        names.append(session_name(key.tenant, session))
    return names


def session_name(tenant: str, session: str) -> str:
    digest = hashlib.sha256(session.encode("utf-8", "replace")[:_SESSION_BYTES]).hexdigest()[:32]
    return f"session/{tenant}/{digest}"


def period_name(prefix: str, period: str, unix_s: float) -> str:
    form = _PERIODS[period]
    return f"{prefix}/{datetime.fromtimestamp(unix_s, UTC).strftime(form)}" if form else prefix


def _key_prefix(name: str) -> str:
    return f"key/{name}/money"

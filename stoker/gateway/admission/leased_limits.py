"""Limits that several gateways share: each gateway leases a part of the limit from the store. Pure: the time is an argument.

A `rate` limit (requests or tokens per minute) leases a part of the rate, and its bucket refills with that part. A `cap` (open
requests, money) leases a part of what may be in use at the same time. The parts of all gateways never add up to more than the
limit. A gateway that has all of a limit enforces it exactly as a single gateway does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

IDLE_S = 5.0  # a limit that was not used for this time gives its lease back
_FAIR_SHARE = 0.05  # weight of an equal share beside the demand, so that a gateway without demand can begin


class LeasedLimit(Protocol):
    """A limit as its leases see it."""

    name: str
    total: float  # the whole limit
    is_rate: bool
    is_whole: bool  # the parts are whole numbers
    held: bool  # a lease is held; without one the whole limit is in force here

    @property
    def spent_name(self) -> str | None:
        """The name under which the store counts what is used up for good."""

    @property
    def amount(self) -> float:
        """The part of the limit that is in force here."""

    def demand(self, now: float) -> float:
        """Return how much is needed here, in the unit of the limit. The next call counts from here."""

    def level(self, now: float) -> float:
        """Return what is left in the bucket of a rate."""

    def grant(self, amount: float, level: float | None, now: float) -> None:
        """Use this part from now on. `level` is set for a bucket that begins; None keeps its share of what was left."""

    def touch(self, now: float) -> None:
        """Note that it is in use."""

    def is_idle(self, now: float) -> bool: ...


@dataclass(frozen=True, slots=True)
class LimitLease:
    """A gateway's part of one limit, as the store keeps it."""

    gateway: str
    amount: float
    demand: float
    level: float
    at_s: float  # Unix time when it was written
    expires_s: float


@dataclass(frozen=True, slots=True)
class LimitPart:
    """What a gateway gets. `level` is None if its bucket goes on."""

    amount: float
    level: float | None


def divide(
    limit: LeasedLimit, spent: float, demand: float, found: Sequence[LimitLease], gateway: str, now_s: float
) -> LimitPart:
    """Return the part of a limit that `gateway` gets, given all leases in the store.

    A gateway that holds no lease may find its own: that of its predecessor, which was killed.
    """
    others = [one for one in found if one.expires_s > now_s and one.gateway != gateway]
    total = max(0.0, limit.total - spent)
    fair = _FAIR_SHARE * total
    weights = demand + fair + sum(one.demand + fair for one in others)
    target = total * (demand + fair) / weights if weights > 0 else total
    if not limit.is_rate:
        target = max(target, demand)  # what is in use here stays here
    free = total - sum(one.amount for one in others)
    amount = max(0.0, min(math.ceil(target), math.floor(free)) if limit.is_whole else min(target, free))
    if not limit.is_rate or limit.held:
        return LimitPart(amount, None)
    if not found:
        return LimitPart(amount, amount)
    # What ended gateways had left, and what has been refilled since. A gateway that was killed spent at most what it used
    # after its last report.
    ended = [one for one in found if one not in others]
    left = sum(min(one.amount, one.level + max(0.0, now_s - one.at_s) * one.amount / 60) for one in ended)
    return LimitPart(amount, min(amount, left))

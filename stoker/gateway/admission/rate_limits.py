"""The limits of one API key: requests per minute, tokens per minute, concurrent requests. Pure: the time is an argument.

Tokens are uncached prompt tokens and generated tokens. A request is charged in four steps:

- `begin` when it arrives, before any work: it counts as one request and as open.
- `estimate` when its prompt tokens are known.
- `charge` while it runs, for the output so far.
- `end` corrects the sum, so a bucket may be below zero for a while.

Where several gateways share a store, a key's limits are leased in parts (`leased_limits.py`). Then each of these enforces the part
that this gateway has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stoker.gateway.admission.leased_limits import IDLE_S, LeasedLimit

_LEAST = 1e-9  # a bucket that leases nothing never refills in practice, and its wait is finite
_CONCURRENCY_RETRY_S = 1.0  # the gateway cannot know when one of the key's requests will end


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request exceeds a limit, and when to retry."""

    retry_after_s: float
    message: str


class Bucket:
    """A token bucket that refills with `per_minute` / 60 per second, up to the amount of one minute. It is a `LeasedLimit`."""

    __slots__ = (
        "_counted_s",
        "_level",
        "_per_s",
        "_refused",
        "_seen_s",
        "_size",
        "_taken",
        "_used_s",
        "held",
        "name",
        "total",
    )

    is_rate = True
    is_whole = False
    spent_name: str | None = None

    def __init__(self, per_minute: float, name: str = "") -> None:
        self.name = name
        self.total = float(per_minute)
        self.held = False
        self._size = self.total
        self._per_s = per_minute / 60.0
        self._level = self._size
        self._seen_s: float | None = None
        self._taken = 0.0  # since the demand was last asked for
        self._counted_s: float | None = None
        self._refused = False
        self._used_s = -math.inf

    @property
    def per_minute(self) -> float:
        return self.total

    @property
    def amount(self) -> float:
        return self._size

    def demand(self, now: float) -> float:
        past_s = max(1.0, now - self._counted_s) if self._counted_s is not None else 1.0
        per_minute = self.total if self._refused else min(self.total, 60.0 * self._taken / past_s)
        self._taken, self._refused, self._counted_s = 0.0, False, now
        return per_minute

    def grant(self, amount: float, level: float | None, now: float) -> None:
        old = self.level(now)
        if level is None:
            level = old * amount / self._size if amount < self._size and old > 0 else old
        self.held = True
        self._size, self._per_s = max(amount, _LEAST), max(amount, _LEAST) / 60.0
        self._level = min(level, self._size)

    def touch(self, now: float) -> None:
        self._used_s = now

    def is_idle(self, now: float) -> bool:
        return now - self._used_s > IDLE_S

    def level(self, now: float) -> float:
        if self._seen_s is not None and now > self._seen_s:
            self._level = min(self._size, self._level + (now - self._seen_s) * self._per_s)
        self._seen_s = now if self._seen_s is None else max(now, self._seen_s)
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Return the time until `amount` can be taken. An amount above the bucket size needs only a full bucket."""
        missing = min(amount, self._size) - self.level(now) if self._size > _LEAST else self._size
        # Less than a microsecond is a floating-point rounding error.
        if missing <= self._per_s * 1e-6:
            return 0.0
        self._refused, self._used_s = True, now
        return missing / self._per_s

    def take(self, amount: float, now: float) -> None:
        self._level = min(self._size, self.level(now) - amount)
        self._taken += amount
        self._used_s = now


class OpenRequests:
    """The limit of concurrent requests. It is a `LeasedLimit`."""

    __slots__ = ("_refused", "_used_s", "allowed", "held", "name", "num_open", "total")

    is_rate = False
    is_whole = True
    spent_name: str | None = None

    def __init__(self, limit: float, name: str = "") -> None:
        self.name = name
        self.total = limit
        self.allowed = limit
        self.held = False
        self.num_open = 0
        self._refused = False
        self._used_s = -math.inf

    @property
    def amount(self) -> float:
        return self.allowed

    def begin(self, now: float) -> None:
        self.num_open += 1
        self._used_s = now

    def is_full(self, now: float) -> bool:
        if self.num_open < self.allowed:
            return False
        self._refused, self._used_s = True, now
        return True

    def demand(self, now: float) -> float:
        more = max(1.0, 0.25 * self.num_open) if self._refused else 0.0
        self._refused = False
        return self.num_open + more

    def level(self, now: float) -> float:
        return 0.0

    def grant(self, amount: float, level: float | None, now: float) -> None:
        self.held = True
        self.allowed = amount

    def touch(self, now: float) -> None:
        self._used_s = now

    def is_idle(self, now: float) -> bool:
        return not self.num_open and now - self._used_s > IDLE_S


class KeyLimiter:
    """All limits of one key. None means no limit. `name` is the key's, under which its limits are leased."""

    __slots__ = ("_open", "_requests", "_tokens", "leased", "limits_tokens", "unlimited")

    def __init__(
        self,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        concurrency: int | None = None,
        name: str = "",
    ) -> None:
        self._requests = None if requests_per_minute is None else Bucket(requests_per_minute, f"key/{name}/requests")
        self._tokens = None if tokens_per_minute is None else Bucket(tokens_per_minute, f"key/{name}/tokens")
        self._open = OpenRequests(math.inf if concurrency is None else concurrency, f"key/{name}/open")
        self.limits_tokens = tokens_per_minute is not None
        limits = (self._requests, self._tokens, None if concurrency is None else self._open)
        self.leased: tuple[LeasedLimit, ...] = tuple(limit for limit in limits if limit is not None)
        self.unlimited = not self.leased

    @property
    def num_open(self) -> int:
        return self._open.num_open

    def begin(self, now: float) -> Refusal | None:
        """Count one request whose size is not known yet. If it exceeds a limit, count nothing and return the refusal.

        Every request needs at least one token, so a key without tokens is refused here, before its body is read.
        """
        if self.unlimited:
            self._open.num_open += 1
            return None
        refusal = self.refusal(now)
        if refusal is not None:
            return refusal
        if self._requests is not None:
            self._requests.take(1, now)
        self._open.begin(now)
        return None

    def refusal(self, now: float) -> Refusal | None:
        """Return why a request that arrives now must be refused, whatever its size, or None. Counts nothing."""
        if self._open.is_full(now):
            return self._too_many()
        if self._requests is not None and (wait_s := self._requests.wait_s(1, now)):
            message = (
                f"This key has reached its limit of {self._requests.per_minute:g} requests per minute;"
                f" retry in {wait_s:.1f} s."
            )
            return Refusal(wait_s, message)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(1, now)):
            message = (
                f"This key has reached its limit of {self._tokens.per_minute:g} tokens per minute;"
                f" retry in {wait_s:.1f} s."
            )
            return Refusal(wait_s, message)
        return None

    def pause(self) -> None:
        """Return the place of a request that waits: it does not count as a concurrent one until `resume`."""
        self._open.num_open -= 1

    def resume(self, now: float) -> Refusal | None:
        """Count the request again, and return the refusal if that is one too many. It must end either way."""
        refusal = self._too_many() if self._open.is_full(now) else None
        self._open.begin(now)
        return refusal

    def _too_many(self) -> Refusal:
        message = (
            f"This key has {self.num_open} concurrent requests here, and its limit is {self._open.total:g};"
            " wait until one has ended."
        )
        return Refusal(_CONCURRENCY_RETRY_S, message)

    def estimate(self, tokens: int, now: float) -> Refusal | None:
        """Charge the estimated prompt tokens of a request that has begun. If the key lacks them, charge nothing."""
        if self._tokens is None:
            return None
        if wait_s := self._tokens.wait_s(tokens, now):
            message = (
                f"This key has reached its limit of {self._tokens.per_minute:g} tokens per minute, and the request needs"
                f" about {tokens} uncached tokens; retry in {wait_s:.1f} s."
            )
            return Refusal(wait_s, message)
        self._tokens.take(tokens, now)
        return None

    def charge(self, tokens: int, now: float) -> None:
        """Charge tokens that a running request has produced."""
        if self._tokens is not None:
            self._tokens.take(tokens, now)

    def end(self, charged: int, used: int, now: float) -> None:
        """End a request that used `used` tokens instead of the `charged` ones."""
        self._open.num_open -= 1
        if self._tokens is not None and used != charged:
            self._tokens.take(used - charged, now)

"""The limits of one API key: requests per minute, tokens per minute, concurrent requests. Pure: the time is an argument.

Tokens are uncached prompt tokens and generated tokens. A request is charged in four steps:

- `begin` when it arrives, before any work: it counts as one request and as open.
- `estimate` when its prompt tokens are known.
- `charge` while it runs, for the output so far.
- `end` corrects the sum, so a bucket may be below zero for a while.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONCURRENCY_RETRY_S = 1.0  # the gateway cannot know when one of the key's requests will end


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request exceeds a limit, and when to retry."""

    retry_after_s: float
    message: str


class Bucket:
    """A token bucket that refills with `per_minute` / 60 per second, up to the amount of one minute."""

    __slots__ = ("_level", "_per_s", "_seen_s", "_size")

    def __init__(self, per_minute: float) -> None:
        self._size = float(per_minute)
        self._per_s = per_minute / 60.0
        self._level = self._size
        self._seen_s: float | None = None

    @property
    def per_minute(self) -> float:
        return self._size

    def level(self, now: float) -> float:
        if self._seen_s is not None and now > self._seen_s:
            self._level = min(self._size, self._level + (now - self._seen_s) * self._per_s)
        self._seen_s = now if self._seen_s is None else max(now, self._seen_s)
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Return the time until `amount` can be taken. An amount above the bucket size needs only a full bucket."""
        missing = min(amount, self._size) - self.level(now)
        # Less than a microsecond is a floating-point rounding error.
        return missing / self._per_s if missing > self._per_s * 1e-6 else 0.0

    def take(self, amount: float, now: float) -> None:
        self._level = min(self._size, self.level(now) - amount)


class KeyLimiter:
    """All limits of one key. None means no limit."""

    __slots__ = ("_concurrency", "_requests", "_tokens", "limits_tokens", "num_open", "unlimited")

    def __init__(
        self,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        concurrency: int | None = None,
    ) -> None:
        self._requests = None if requests_per_minute is None else Bucket(requests_per_minute)
        self._tokens = None if tokens_per_minute is None else Bucket(tokens_per_minute)
        self._concurrency = concurrency
        self.limits_tokens = tokens_per_minute is not None
        self.unlimited = requests_per_minute is None and tokens_per_minute is None and concurrency is None
        self.num_open = 0

    def begin(self, now: float) -> Refusal | None:
        """Count one request whose size is not known yet. If it exceeds a limit, count nothing and return the refusal.

        Every request needs at least one token, so a key without tokens is refused here, before its body is read.
        """
        if self.unlimited:
            self.num_open += 1
            return None
        refusal = self.refusal(now)
        if refusal is not None:
            return refusal
        if self._requests is not None:
            self._requests.take(1, now)
        self.num_open += 1
        return None

    def refusal(self, now: float) -> Refusal | None:
        """Return why a request that arrives now must be refused, whatever its size, or None. Counts nothing."""
        if self._concurrency is not None and self.num_open >= self._concurrency:
            message = (
                f"This key has {self.num_open} concurrent requests, and its limit is {self._concurrency};"
                " wait until one has ended."
            )
            return Refusal(_CONCURRENCY_RETRY_S, message)
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
        self.num_open -= 1
        if self._tokens is not None and used != charged:
            self._tokens.take(used - charged, now)

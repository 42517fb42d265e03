"""What one key may use: requests a minute, tokens a minute, requests at a time. Pure: the time is an argument.

Tokens are those that cost work: prompt tokens that were not cached, and generated ones. They are taken as an estimate when a
request comes and settled when it ends, so a bucket may stand below zero for a while.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONCURRENCY_RETRY_S = 1.0  # when one of its own requests ends is the caller's to know


@dataclass(frozen=True, slots=True)
class Refusal:
    limit: str
    retry_after_s: float
    message: str


class Bucket:
    """Fills at `per_minute` / 60 a second up to one minute's worth."""

    __slots__ = ("_level", "_per_s", "_seen_s", "_size")

    def __init__(self, per_minute: float) -> None:
        self._size = float(per_minute)
        self._per_s = per_minute / 60.0
        self._level = self._size
        self._seen_s: float | None = None

    def level(self, now: float) -> float:
        if self._seen_s is not None and now > self._seen_s:
            self._level = min(self._size, self._level + (now - self._seen_s) * self._per_s)
        self._seen_s = now if self._seen_s is None else max(now, self._seen_s)
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Until `amount` can be taken. What exceeds the whole bucket needs a full one, and then goes below zero."""
        missing = min(amount, self._size) - self.level(now)
        # A wait shorter than a microsecond is what adding small floats left over.
        return missing / self._per_s if missing > self._per_s * 1e-6 else 0.0

    def take(self, amount: float, now: float) -> None:
        self._level = min(self._size, self.level(now) - amount)


class KeyLimiter:
    """All limits of one key. `None` is no limit."""

    __slots__ = ("_concurrency", "_requests", "_tokens", "num_open", "unlimited")

    def __init__(
        self,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        concurrency: int | None = None,
    ) -> None:
        self._requests = None if requests_per_minute is None else Bucket(requests_per_minute)
        self._tokens = None if tokens_per_minute is None else Bucket(tokens_per_minute)
        self._concurrency = concurrency
        self.unlimited = requests_per_minute is None and tokens_per_minute is None and concurrency is None
        self.num_open = 0

    def begin(self, tokens: int, now: float) -> Refusal | None:
        """Takes one request of about so many tokens, or says why not; a refused one takes nothing."""
        if self.unlimited:
            self.num_open += 1
            return None
        if self._concurrency is not None and self.num_open >= self._concurrency:
            message = f"This key has {self.num_open} requests open; it may have {self._concurrency}."
            return Refusal("concurrency", _CONCURRENCY_RETRY_S, message)
        if self._requests is not None and (wait_s := self._requests.wait_s(1, now)):
            return Refusal("requests_per_minute", wait_s, "This key has used its requests for this minute.")
        if self._tokens is not None and (wait_s := self._tokens.wait_s(tokens, now)):
            message = f"This key has used its tokens for this minute; the request needs about {tokens} uncached ones."
            return Refusal("tokens_per_minute", wait_s, message)
        if self._requests is not None:
            self._requests.take(1, now)
        if self._tokens is not None:
            self._tokens.take(tokens, now)
        self.num_open += 1
        return None

    def end(self, estimated: int, actual: int, now: float) -> None:
        """The request is over; it used `actual` tokens where `estimated` were taken."""
        self.num_open -= 1
        if self._tokens is not None and actual != estimated:
            self._tokens.take(actual - estimated, now)

    def give_back(self, estimated: int, now: float) -> None:
        """The request never ran (it was refused elsewhere): as if it had not come."""
        self.num_open -= 1
        if self._requests is not None:
            self._requests.take(-1, now)
        if self._tokens is not None:
            self._tokens.take(-estimated, now)

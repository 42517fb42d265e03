"""Acceptance: how often the guesses of each source were right. Pure.

Every sampled token is compared with the tape's guess for it, also where no draft was verified. So a source that is not
used now is still observed, at no cost.
"""

from __future__ import annotations

from collections.abc import Mapping

_DECAY = 0.9  # weight of the older observations at each new one, within a sequence
_GLOBAL_DECAY = 0.995  # the same over all sequences
_PRIOR_WEIGHT = 3.0  # observations that the rate over all sequences counts for in a new one
_FIRST_RATE = 0.6  # before any observation, unless `first_rates` has the source


class Rate:
    """The share of right guesses, recent ones counting more."""

    __slots__ = ("_decay", "right", "total")

    def __init__(self, decay: float, right: float = 0.0, total: float = 0.0) -> None:
        self._decay = decay
        self.right = right
        self.total = total

    def record(self, is_right: bool) -> None:
        self.right = self._decay * self.right + is_right
        self.total = self._decay * self.total + 1.0


class Acceptance:
    """The rates of all sources: over all sequences here, and in `SequenceRates` within one.

    `first_rates` are the rates of some sources before any observation.
    """

    def __init__(self, first_rates: Mapping[str, float]) -> None:
        self._first_rates = first_rates
        self._by_source: dict[str, Rate] = {}

    def of(self, source: str) -> Rate:
        rate = self._by_source.get(source)
        if rate is None:
            rate = self._by_source[source] = Rate(_GLOBAL_DECAY, self._first_rates.get(source, _FIRST_RATE), 1.0)
        return rate

    def value(self, source: str) -> float:
        rate = self.of(source)
        return rate.right / rate.total


class SequenceRates:
    """The rates of the sources within one sequence. The rates over all sequences are their starting point."""

    __slots__ = ("_all", "_own")

    def __init__(self, everywhere: Acceptance) -> None:
        self._all = everywhere
        self._own: dict[str, Rate] = {}

    def record(self, source: str, is_right: bool) -> None:
        self._all.of(source).record(is_right)
        rate = self._own.get(source)
        if rate is None:
            rate = self._own[source] = Rate(_DECAY)
        rate.record(is_right)

    def value(self, source: str) -> float:
        """Return the estimated probability that the source's next guess is right."""
        prior, own = self._all.value(source), self._own.get(source)
        if own is None:
            return prior
        return (own.right + _PRIOR_WEIGHT * prior) / (own.total + _PRIOR_WEIGHT)

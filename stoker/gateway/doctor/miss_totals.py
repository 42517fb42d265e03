"""MissTotals: computed prompt tokens by API key, model and reason, since the gateway started."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stoker.gateway.admission.prices import PriceList, in_currency
from stoker.gateway.doctor.miss_parts import CHANGED, MissPart
from stoker.proto.admin_api import KeyMisses, MissList, MissReason

_MAX_KEYS = 4096  # pairs of a key and a model; further ones are counted together
_OTHER = "other"
_MAX_NUMBER = 99  # of a message or a tool in a place
_NUMBER = re.compile(r"\d{3,}")


class _KeyTotals:
    __slots__ = ("cached_tokens", "prompt_tokens", "reasons", "requests", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.requests = self.prompt_tokens = self.cached_tokens = 0
        self.reasons: dict[tuple[str, str], list[int]] = {}  # (reason, place) -> requests, tokens


class MissTotals:
    """The counts, and what they cost by the price list."""

    def __init__(self, prices: PriceList, currency: str, since_s: float) -> None:
        self._prices = prices
        self._currency = currency
        self._since_s = since_s
        self._keys: dict[tuple[str, str], _KeyTotals] = {}

    def add(
        self, key_id: str, tenant: str, model: str, prompt_tokens: int, cached_tokens: int, parts: Sequence[MissPart]
    ) -> None:
        """Count one request."""
        totals = self._keys.get((key_id, model))
        if totals is None:
            if len(self._keys) >= _MAX_KEYS:
                key_id = model = tenant = _OTHER
            totals = self._keys.setdefault((key_id, model), _KeyTotals(tenant))
        totals.requests += 1
        totals.prompt_tokens += prompt_tokens
        totals.cached_tokens += cached_tokens
        for part in parts:
            at = (part.reason, _bounded(part.place) if part.reason == CHANGED else "")
            counts = totals.reasons.get(at)
            if counts is None:
                counts = totals.reasons[at] = [0, 0]
            counts[0] += 1
            counts[1] += part.tokens

    def report(self, key_id: str | None = None) -> MissList:
        """Return the totals of all keys, or of one, with the most uncached tokens first."""
        found = [
            self._of_key(key, model, totals)
            for (key, model), totals in self._keys.items()
            if key_id is None or key == key_id
        ]
        found.sort(key=lambda one: one.cached_tokens - one.prompt_tokens)
        return MissList(since_s=self._since_s, currency=self._currency, keys=found)

    def _of_key(self, key_id: str, model: str, totals: _KeyTotals) -> KeyMisses:
        price = self._prices.price(model)
        reasons = [
            MissReason(
                reason=reason,
                place=place,
                requests=requests,
                tokens=tokens,
                cost=in_currency(tokens * price.input),
                extra_cost=in_currency(tokens * (price.input - price.cached_input)),
            )
            for (reason, place), (requests, tokens) in totals.reasons.items()
        ]
        reasons.sort(key=lambda one: -one.tokens)
        return KeyMisses(
            key=key_id,
            tenant=totals.tenant,
            model=model,
            requests=totals.requests,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
            reasons=reasons,
        )


def _bounded(place: str) -> str:
    """Return the place with a bounded number, so that the counts of one key stay few."""
    return _NUMBER.sub(f"{_MAX_NUMBER + 1}+", place)

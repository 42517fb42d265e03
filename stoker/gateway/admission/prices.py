"""The price list: prices per million tokens, with a separate price for cached input. Pure.

Amounts are integers in units of 1e-12 of the currency, never floats, so all sums are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal

from stoker.gateway.key_settings import PriceSettings

_UNITS_PER_TOKEN = Decimal(10) ** 6  # a price of 1 per million tokens is this many units per token
_UNIT = Decimal(10) ** -12


@dataclass(frozen=True, slots=True)
class Price:
    """Prices of one token, in units of 1e-12 of the currency."""

    input: int
    cached_input: int
    output: int

    def units(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        uncached = prompt_tokens - cached_tokens
        return uncached * self.input + cached_tokens * self.cached_input + completion_tokens * self.output


FREE = Price(0, 0, 0)


class PriceList:
    """The price of each model. Models without a price, and without a "*" entry, are free."""

    def __init__(self, settings: Sequence[PriceSettings] = ()) -> None:
        self._by_model = {one.model: _price(one) for one in settings}
        self._other = self._by_model.get("*", FREE)

    def price(self, model: str) -> Price:
        return self._by_model.get(model, self._other)


def in_currency(units: int) -> str:
    """Return an amount as an exact decimal number."""
    text = f"{Decimal(units) * _UNIT:.12f}".rstrip("0")
    return text + "00" if text.endswith(".") else text


def _price(settings: PriceSettings) -> Price:
    cached = settings.input if settings.cached_input is None else settings.cached_input
    return Price(*(_units(value) for value in (settings.input, cached, settings.output)))


def _units(per_million: float) -> int:
    # str() restores the digits that the operator wrote: 0.1, not 0.1000000000000000055.
    return int((Decimal(str(per_million)) * _UNITS_PER_TOKEN).to_integral_value(ROUND_HALF_EVEN))

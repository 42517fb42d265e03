"""The price list: for a million tokens, with a price of its own for cached input. Exact: whole 1e-12ths of a currency unit a
token, never floats. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal

from stoker.gateway.config import PriceSettings

_UNITS_A_TOKEN = Decimal(10) ** 6  # of a price for a million tokens
_UNIT = Decimal(10) ** -12


@dataclass(frozen=True, slots=True)
class Price:
    """In 1e-12ths of the currency, for one token."""

    input: int
    cached_input: int
    output: int

    def units(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        uncached = prompt_tokens - cached_tokens
        return uncached * self.input + cached_tokens * self.cached_input + completion_tokens * self.output


FREE = Price(0, 0, 0)


class PriceList:
    def __init__(self, settings: Sequence[PriceSettings] = ()) -> None:
        self._by_model = {one.model: _price(one) for one in settings}
        self._other = self._by_model.get("*", FREE)

    def price(self, model: str) -> Price:
        return self._by_model.get(model, self._other)


def in_currency(units: int) -> str:
    """A plain decimal number, exact."""
    text = f"{Decimal(units) * _UNIT:.12f}".rstrip("0")
    return text + "00" if text.endswith(".") else text


def _price(settings: PriceSettings) -> Price:
    cached = settings.input if settings.cached_input is None else settings.cached_input
    return Price(*(_units(value) for value in (settings.input, cached, settings.output)))


def _units(for_a_million: float) -> int:
    # str() gives back the digits the operator wrote: 0.1 is a tenth, not 0.1000000000000000055.
    return int((Decimal(str(for_a_million)) * _UNITS_A_TOKEN).to_integral_value(ROUND_HALF_EVEN))

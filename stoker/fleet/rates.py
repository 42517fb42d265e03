"""The measured speed of one worker: prefill tokens per second, and seconds per decode step."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp


@dataclass(slots=True, eq=False)
class Smoothed:
    """A weighted moving average. A sample's influence halves after `half_life` more weight has been added."""

    half_life: float
    total: float = 0.0
    weight: float = 0.0

    def add(self, amount: float, weight: float) -> None:
        fade = exp(-0.6931 * weight / self.half_life)
        self.total = self.total * fade + amount
        self.weight = self.weight * fade + weight

    @property
    def value(self) -> float | None:
        return self.total / self.weight if self.weight > 0 else None


class Rates:
    """A worker's rates. A rate that the worker reports itself takes precedence over one measured by the gateway."""

    def __init__(self) -> None:
        self._measured = Smoothed(half_life=10.0)  # tokens, weighted by seconds of prefill
        self._reported: float | None = None
        self.prefill_tokens_per_s: float | None = None
        self.step_s: float | None = None

    @property
    def are_known(self) -> bool:
        return self.prefill_tokens_per_s is not None and self.step_s is not None

    def measured(self, tokens: int, seconds: float) -> None:
        if tokens > 0 and seconds > 0:
            self._measured.add(tokens, seconds)
            self._update()

    def reported(self, prefill_tokens_per_s: float | None, step_s: float | None) -> None:
        self._reported = prefill_tokens_per_s or self._reported
        self.step_s = step_s or self.step_s
        self._update()

    def _update(self) -> None:
        self.prefill_tokens_per_s = self._reported or self._measured.value

"""How fast a worker is: prefill tokens a second and seconds a decode step, measured, smoothed, or the fleet's average."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp


@dataclass(slots=True, eq=False)
class Smoothed:
    """An average that forgets: a sample counts by its own weight, and half as much after `half_life` more of it."""

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
    """A worker's own report beats what we measured from outside; that beats nothing."""

    def __init__(self) -> None:
        self._measured = Smoothed(half_life=10.0)  # tokens over seconds of prefill
        self._reported: float | None = None
        self.prefill_tokens_per_s: float | None = None
        self.step_s: float | None = None

    def measured(self, tokens: int, seconds: float) -> None:
        if tokens > 0 and seconds > 0:
            self._measured.add(tokens, seconds)
            self._settle()

    def reported(self, prefill_tokens_per_s: float | None, step_s: float | None) -> None:
        self._reported = prefill_tokens_per_s or self._reported
        self.step_s = step_s or self.step_s
        self._settle()

    def _settle(self) -> None:
        self.prefill_tokens_per_s = self._reported or self._measured.value

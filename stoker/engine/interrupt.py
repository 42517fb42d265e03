"""Interrupts: how a forward pass on a CPU ends early, if an interactive request arrives during a step of flex sequences.

The check runs before each layer. What the step has computed is lost, and the scheduler puts its sequences back into the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from stoker.layers.features import Tap


class StepInterrupted(Exception):
    """Raised inside a forward pass that is no longer wanted."""


class Interrupt:
    """Ends a forward pass as soon as `is_wanted` returns True."""

    def __init__(self, is_wanted: Callable[[], bool], num_layers: int) -> None:
        self._is_wanted = is_wanted
        self._checks = [Tap(layer, self._check) for layer in range(num_layers)]

    def with_checks(self, taps: Sequence[Tap]) -> list[Tap]:
        """Return `taps` with a check before each layer."""
        return sorted([*self._checks, *taps], key=lambda tap: tap.layer)

    def _check(self, hidden: Tensor) -> None:
        if self._is_wanted():
            raise StepInterrupted


NO_INTERRUPT = Interrupt(lambda: False, 0)

"""Drafts: tokens that are guessed, computed together with the last known token, and kept only where sampling agrees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from stoker.sched.sequence import Sequence
from stoker.sched.step_costs import StepCosts


class TapeDrafter(Protocol):
    """Guesses continuations on the host. Pure: the same sequences give the same guesses."""

    def propose(self, seq: Sequence, max_tokens: int) -> list[int]:
        """Return up to `max_tokens` tokens that may follow `seq.token_ids`. Empty: no guess.

        It is called for a running sequence before a step, at most once per step. It must be fast: tens of microseconds.
        """

    def ended(self, seq: Sequence) -> None:
        """Take in that a sequence has ended. Its state here is dropped."""


class Drafting(Protocol):
    """Decides which drafts a step verifies."""

    def plan(self, seqs: list[Sequence], budget: int, costs: StepCosts) -> Mapping[Sequence, int]:
        """Return the number of drafts of each decoding sequence in the next step, at most `budget` in total.

        Sequences without drafts may be missing. Sets `seq.tape` where a sequence gets a new tape.
        """

    def committed(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Take in the outcome of a step in which the sequence had `num_drafts` drafts. Its new tokens are known."""

    def ended(self, seqs: Iterable[Sequence]) -> None:
        """Take in that sequences have ended."""


class NoDrafting:
    """No sequence ever has a draft."""

    def plan(self, seqs: list[Sequence], budget: int, costs: StepCosts) -> Mapping[Sequence, int]:
        return {}

    def committed(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        pass

    def ended(self, seqs: Iterable[Sequence]) -> None:
        pass

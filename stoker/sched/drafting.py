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
    """Decides which drafts a step verifies, and how many a draft model guesses after it."""

    @property
    def uses_costs(self) -> bool:
        """True if `plan` looks at the costs. Otherwise they need not be fitted for each step."""

    @property
    def num_guesses(self) -> int:
        """The guesses that a draft model makes for each row after the step that was planned last."""

    def plan(self, seqs: list[Sequence], budget: int, costs: StepCosts) -> Mapping[Sequence, int]:
        """Return the number of drafts of each decoding sequence in the next step, at most `budget` in total.

        Sequences without drafts may be missing. Sets `seq.tape` where a sequence gets a new tape.
        """

    def launched(self, seqs: Iterable[Sequence]) -> None:
        """Take in which sequences have drafts in the step that was planned last. Others had no room for theirs."""

    def committed(self, seq: Sequence, num_drafts: int, token_ids: list[int]) -> None:
        """Take in the tokens that a span with `num_drafts` drafts sampled. All but the last are accepted drafts.

        The tokens are not yet among the sequence's.
        """

    def dropped(self, seq: Sequence) -> None:
        """Take in that the sequence's drafts in the oldest step were not verified, because the step was interrupted."""

    def suggested(self, seq: Sequence, token_ids: list[int]) -> None:
        """Take in what the runner expects to follow the sequence's tokens, such as text that its grammar forces."""

    def ended(self, seq: Sequence) -> None:
        """Take in that a sequence has ended."""


class NoDrafting:
    """No sequence ever has a draft."""

    uses_costs = False
    num_guesses = 0

    def plan(self, seqs: list[Sequence], budget: int, costs: StepCosts) -> Mapping[Sequence, int]:
        return {}

    def launched(self, seqs: Iterable[Sequence]) -> None:
        pass

    def committed(self, seq: Sequence, num_drafts: int, token_ids: list[int]) -> None:
        pass

    def dropped(self, seq: Sequence) -> None:
        pass

    def suggested(self, seq: Sequence, token_ids: list[int]) -> None:
        pass

    def ended(self, seq: Sequence) -> None:
        pass

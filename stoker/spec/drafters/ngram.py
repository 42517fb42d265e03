"""N-grams: what followed the last tokens when they occurred before in the same sequence.

Agents repeat their input: they copy names, paths, arguments and code from the prompt into the output.
"""

from __future__ import annotations

from stoker.sched.sequence import Sequence
from stoker.spec.drafter import DRAFTERS, DrafterParts
from stoker.spec.ngram_table import NgramTable
from stoker.spec.sequence_states import SequenceStates


@DRAFTERS.register("ngram")
class NgramDrafter:
    """Copies the continuation of the latest occurrence of the last 4 tokens, or else of the last 3 or 2."""

    def __init__(self, parts: DrafterParts) -> None:
        parts.refuse_argument("ngram")
        self._tables = SequenceStates(lambda _: NgramTable())

    def propose(self, seq: Sequence, max_tokens: int) -> list[int]:
        table = self._tables.get(seq)
        table.update(seq.token_ids)
        position = table.find(seq.token_ids)
        if position is None:
            return []
        guesses = seq.token_ids[position : position + max_tokens]
        # The occurrence may overlap with the end: the text repeats itself with this period.
        period = len(seq.token_ids) - position
        while len(guesses) < max_tokens:
            guesses.append(guesses[-period])
        return guesses

    def ended(self, seq: Sequence) -> None:
        self._tables.pop(seq)

"""The beginning of outputs with a grammar: text that the grammar forces from the start.

Later forced text depends on the output, so the runner suggests it with the result of each step. The step after a prompt is planned
before the prompt's result is known. What this drafter proposes is known before: it was found when the grammar was compiled.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from stoker.sched.sequence import Sequence
from stoker.spec.drafter import DRAFTERS, DrafterParts
from stoker.spec.sequence_states import SequenceStates


@DRAFTERS.register("grammar")
class GrammarDrafter:
    """Proposes what is left of the forced beginning, while the output agrees with it."""

    def __init__(self, parts: DrafterParts) -> None:
        parts.refuse_argument("grammar")
        self._forced_start = parts.forced_start
        self._starts = SequenceStates(self._start_of)

    def propose(self, seq: Sequence, max_tokens: int) -> list[int]:
        if seq.request.sampling.grammar is None:
            return []
        start = self._starts.get(seq)
        first = seq.request.num_prompt
        num_output = len(seq.token_ids) - first
        if num_output >= len(start) or seq.token_ids[first:] != list(start[:num_output]):
            return []
        return list(start[num_output:][:max_tokens])

    def ended(self, seq: Sequence) -> None:
        self._starts.pop(seq)

    def _start_of(self, seq: Sequence) -> Tokens[int]:
        grammar = seq.request.sampling.grammar
        return () if grammar is None else self._forced_start(grammar)

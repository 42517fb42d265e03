"""Predicted outputs: the text that the client expects, from the request's `prediction` field.

An agent that edits a file knows most of the new text. The output is followed through the prediction. Where they differ,
the output's last tokens are searched in the rest of the prediction.
"""

from __future__ import annotations

from array import array

from stoker.sched.sequence import Sequence
from stoker.spec.drafter import DRAFTERS, DrafterParts
from stoker.spec.sequence_states import SequenceStates

_SEARCH_TOKENS = (4, 3, 2)  # of the output's end, longest first
_SURE_TOKENS = 8  # if this many tokens agree after a search, its place was right, and what lies before it is used up
_MAX_UNALIGNED = 16  # hits between two tokens after which a search is given up


class _Alignment:
    """Where the output stands in the prediction."""

    def __init__(self, seq: Sequence) -> None:
        self._prediction = seq.request.prediction
        self._packed = array("q", self._prediction).tobytes()
        self._num_read = seq.request.num_prompt  # tokens of the sequence that were compared
        self._next = 0  # where the prediction continues, while the output agrees with it
        self._num_equal = _SURE_TOKENS  # tokens that agreed since the last search
        self._searched_from = 0  # everything before it is used up
        self._agrees = True

    def update(self, seq: Sequence) -> None:
        """Compare the new tokens of the output with the prediction."""
        output = seq.token_ids
        for i in range(self._num_read, len(output)):
            if self._agrees and self._next < len(self._prediction) and self._prediction[self._next] == output[i]:
                self._next += 1
                self._num_equal += 1
            else:
                self._search(output[max(seq.request.num_prompt, i + 1 - _SEARCH_TOKENS[0]) : i + 1])
        self._num_read = len(output)

    def rest(self, max_tokens: int) -> list[int]:
        return list(self._prediction[self._next : self._next + max_tokens]) if self._agrees else []

    def _search(self, last_tokens: list[int]) -> None:
        """Find the nearest place in the rest of the prediction that follows the same tokens."""
        if self._num_equal >= _SURE_TOKENS:
            self._searched_from = self._next
        self._agrees, self._num_equal = False, 0
        for size in _SEARCH_TOKENS:
            if size <= len(last_tokens) and (place := self._find(last_tokens[-size:])) is not None:
                self._next, self._agrees = place + size, True
                return

    def _find(self, tokens: list[int]) -> int | None:
        pattern, start = array("q", tokens).tobytes(), 8 * self._searched_from
        for _ in range(_MAX_UNALIGNED):
            start = self._packed.find(pattern, start)
            if start < 0:
                return None
            if start % 8 == 0:
                return start // 8
            start += 1
        return None


@DRAFTERS.register("prediction")
class PredictionDrafter:
    """Proposes the rest of the request's prediction while the output agrees with it."""

    def __init__(self, parts: DrafterParts) -> None:
        parts.refuse_argument("prediction")
        self._alignments = SequenceStates(_Alignment)

    def propose(self, seq: Sequence, max_tokens: int) -> list[int]:
        if not seq.request.prediction:
            return []
        alignment = self._alignments.get(seq)
        alignment.update(seq)
        return alignment.rest(max_tokens)

    def ended(self, seq: Sequence) -> None:
        self._alignments.pop(seq)

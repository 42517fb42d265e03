"""Predicted outputs: the text that the client expects, from the request's `prediction` field.

An agent that edits a file knows most of the new text. The output is followed through the prediction. Where they differ,
the output's last tokens are searched in the following part of the prediction. All rows wait for the search, and the client
chooses the prediction, so that the time of a search must not depend on its length or contents.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stoker.sched.sequence import Sequence
from stoker.spec.drafter import DRAFTERS, DrafterParts
from stoker.spec.sequence_states import SequenceStates

_SEARCH_TOKENS = (4, 3, 2)  # of the output's end, longest first
_SURE_TOKENS = 8  # if this many tokens agree after a search, its place was right, and what lies before it is used up
_WINDOW = 8192  # tokens of the prediction that are searched
_MAX_SEARCHES = 4  # in one step; only the last tokens of a longer output are searched


class _Alignment:
    """The place of the output in the prediction."""

    def __init__(self, seq: Sequence) -> None:
        self._prediction = seq.request.prediction
        self._tokens = np.array(self._prediction, dtype=np.int64)
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
                self._leave()
                if i >= len(output) - _MAX_SEARCHES:
                    self._search(output[max(seq.request.num_prompt, i + 1 - _SEARCH_TOKENS[0]) : i + 1])
        self._num_read = len(output)

    def rest(self, max_tokens: int) -> list[int]:
        return list(self._prediction[self._next : self._next + max_tokens]) if self._agrees else []

    def _leave(self) -> None:
        """Take in that the output differs from the prediction."""
        if self._num_equal >= _SURE_TOKENS:
            self._searched_from = self._next
        self._agrees, self._num_equal = False, 0

    def _search(self, last_tokens: list[int]) -> None:
        """Find the nearest place in the next part of the prediction that follows the same tokens."""
        window = self._tokens[self._searched_from : self._searched_from + _WINDOW]
        for size in _SEARCH_TOKENS:
            if size <= len(last_tokens) and (place := _find(window, last_tokens[-size:])) is not None:
                self._next, self._agrees = self._searched_from + place + size, True
                return


def _find(window: NDArray[np.int64], tokens: list[int]) -> int | None:
    """Return where the tokens occur first."""
    num_places = len(window) - len(tokens) + 1
    if num_places <= 0:
        return None
    is_here = window[:num_places] == tokens[0]
    for i, token_id in enumerate(tokens[1:], 1):
        is_here &= window[i : i + num_places] == token_id
    place = int(is_here.argmax())
    return place if is_here[place] else None


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

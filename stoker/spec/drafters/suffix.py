"""Suffixes: what followed the last tokens most often in recent outputs of the same tenant.

Agents answer in the same forms again and again: the same tool calls, the same phrases, the same files. Every salt has a
history of its own, and a sequence is compared only with the history of its salt and with its own output.
"""

from __future__ import annotations

from collections import OrderedDict

from stoker.sched.sequence import Sequence
from stoker.spec.drafter import DRAFTERS, DrafterParts
from stoker.spec.sequence_states import SequenceStates
from stoker.spec.token_history import BORDER, CONTEXT, TokenHistory

_MAX_SALTS = 64  # the salt that was not used for the longest time is dropped first
_SALT_TOKENS = 1 << 15  # per salt; 20 bytes each
_OUTPUT_TOKENS = 1 << 12  # of one output; an engine step waits while they are added
_OWN_TOKENS = 1 << 10  # of the running sequence's own output
_PROMPT_TOKENS = 8  # of the prompt, before each output: they tell how an output begins
_MATCH_TOKENS = 8  # longer matches count no more than matches of this length
_MAX_OCCURRENCES = 16
_MIN_PROBABILITY = 0.4  # of all guesses up to this one being right


class _OwnOutput:
    """The running sequence's output, as far as it was taken in."""

    def __init__(self, seq: Sequence) -> None:
        self.history = TokenHistory(_OWN_TOKENS)
        self._num_added = max(0, seq.request.num_prompt - _PROMPT_TOKENS)

    def update(self, seq: Sequence) -> None:
        first = max(self._num_added, len(seq.token_ids) - _OWN_TOKENS)
        self.history.add(seq.token_ids[first:])
        self._num_added = len(seq.token_ids)


@DRAFTERS.register("suffix")
class SuffixDrafter:
    """Follows the earlier occurrences of the last tokens, as long as most of them agree."""

    def __init__(self, parts: DrafterParts) -> None:
        parts.refuse_argument("suffix")
        self._own = SequenceStates(_OwnOutput)
        self._histories: OrderedDict[str, TokenHistory] = OrderedDict()  # by salt

    def propose(self, seq: Sequence, max_tokens: int) -> list[int]:
        own = self._own.get(seq)
        own.update(seq)
        context = seq.token_ids[-_MATCH_TOKENS:]
        if len(context) < CONTEXT:
            return []
        histories = [own.history]
        if (shared := self._histories.get(seq.request.cache_salt)) is not None:
            histories.append(shared)
        return _most_likely(_longest_matches(histories, context, max_tokens))

    def ended(self, seq: Sequence) -> None:
        self._own.pop(seq)
        if not seq.has_output:
            return
        first = max(0, seq.request.num_prompt - _PROMPT_TOKENS, len(seq.token_ids) - _OUTPUT_TOKENS)
        self._history_of(seq.request.cache_salt).add([*seq.token_ids[first:], BORDER])

    def _history_of(self, salt: str) -> TokenHistory:
        history = self._histories.get(salt)
        if history is None:
            history = self._histories[salt] = TokenHistory(_SALT_TOKENS)
            if len(self._histories) > _MAX_SALTS:
                self._histories.popitem(last=False)
        self._histories.move_to_end(salt)
        return history


def _longest_matches(histories: list[TokenHistory], context: list[int], max_tokens: int) -> list[list[int]]:
    """Return what followed the occurrences with the longest match, newest first, at most _MAX_OCCURRENCES."""
    best = CONTEXT
    longest: list[tuple[TokenHistory, int]] = []
    for history in histories:
        for position in history.occurrences(context):
            length = history.match_length(position, context, _MATCH_TOKENS)
            if length > best:
                best, longest = length, []
            if length == best:
                longest.append((history, position))
    return [history.text_from(position, max_tokens) for history, position in longest[:_MAX_OCCURRENCES]]


def _most_likely(texts: list[list[int]]) -> list[int]:
    """Return the most frequent beginning of the texts, as long as it is likely enough."""
    guesses: list[int] = []
    num_needed = _MIN_PROBABILITY * len(texts)
    while texts:
        i = len(guesses)
        if len(texts) == 1:
            return guesses + texts[0][i:] if num_needed <= 1 else guesses
        tokens = [text[i] for text in texts if i < len(text)]
        if not tokens:
            break
        token_id = max(dict.fromkeys(tokens), key=tokens.count)  # of equally frequent tokens, the newest
        if tokens.count(token_id) < num_needed:
            break
        guesses.append(token_id)
        texts = [text for text in texts if i < len(text) and text[i] == token_id]
    return guesses

"""Token ids, as they come, to text that is valid UTF-8 at every moment.

It holds back bytes that may still become a character. It refuses to know stop strings, parsers and why a token came.
"""

from __future__ import annotations

from codecs import utf_8_decode
from typing import Protocol

from stoker.text.vocabulary import Vocabulary


class HasVocabulary(Protocol):
    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def special_ids(self) -> frozenset[int]: ...


class Detokenizer:
    """The texts of all pushes and of flush, joined, are what decoding all the ids at once gives. `goes_on`: they stand behind
    another text, and what a text's beginning would lose belongs between the two."""

    def __init__(self, tokenizer: HasVocabulary, skip_special_tokens: bool = True, goes_on: bool = False) -> None:
        vocabulary = tokenizer.vocabulary
        self._table = vocabulary.table
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._held = b""  # the beginning of a character
        self._first_token = vocabulary.leading_space == "first_token" and not goes_on
        self._spaces_to_cut = 0 if goes_on else vocabulary.leading_cut

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        spelled = self._table[token_id] if 0 <= token_id < len(self._table) else b""
        if self._first_token:
            self._first_token = False
            spelled = spelled.replace(b" ", b"")
        if self._held:
            spelled = self._held + spelled
        text, num_bytes = utf_8_decode(spelled, "replace", False)
        self._held = spelled[num_bytes:]
        return self._cut(text) if self._spaces_to_cut else text

    def flush(self) -> str:
        """What was held back: a character that never became whole is one U+FFFD."""
        held, self._held = self._held, b""
        return self._cut(held.decode("utf-8", "replace"))

    def _cut(self, text: str) -> str:
        while self._spaces_to_cut and text:
            if not text.startswith(" "):
                self._spaces_to_cut = 0
                break
            text = text[1:]
            self._spaces_to_cut -= 1
        return text

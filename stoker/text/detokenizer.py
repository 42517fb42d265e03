"""Token ids, as they come, to text that is valid UTF-8 at every moment.

It holds back bytes that may still become a character. It refuses to know stop strings, parsers and why a token came.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

from stoker.text.vocabulary import Vocabulary


class HasVocabulary(Protocol):
    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def special_ids(self) -> frozenset[int]: ...


class Detokenizer:
    """The texts of all pushes and of flush, joined, are what decoding all the ids at once gives."""

    def __init__(self, tokenizer: HasVocabulary, skip_special_tokens: bool = True) -> None:
        self._vocabulary = tokenizer.vocabulary
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._first_token = self._vocabulary.leading_space == "first_token"
        self._spaces_to_cut = self._vocabulary.leading_cut

    def push(self, token_ids: Iterable[int]) -> str:
        spelled = [self._vocabulary.bytes_of(token_id) for token_id in token_ids if token_id not in self._skipped]
        if self._first_token and spelled:
            self._first_token = False
            spelled[0] = spelled[0].replace(b" ", b"")
        return self._cut(self._decoder.decode(b"".join(spelled)))

    def flush(self) -> str:
        """What was held back: a character that never became whole is one U+FFFD."""
        return self._cut(self._decoder.decode(b"", True))

    def _cut(self, text: str) -> str:
        while self._spaces_to_cut and text:
            if not text.startswith(" "):
                self._spaces_to_cut = 0
                break
            text = text[1:]
            self._spaces_to_cut -= 1
        return text

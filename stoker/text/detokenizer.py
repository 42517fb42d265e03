"""Convert a stream of token ids to text. Bytes of an incomplete UTF-8 character are held back.

This module does not know stop strings or parsers.
"""

from __future__ import annotations

from codecs import utf_8_decode
from typing import Protocol

from stoker.text.vocabulary import Vocabulary


class HasVocabulary(Protocol):
    """The part of a tokenizer that a detokenizer needs."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def special_ids(self) -> frozenset[int]: ...


class Detokenizer:
    """Decodes token ids one by one. The joined results of all `push` calls and `flush` equal the decoding of all ids at once.

    `continues_text`: the tokens continue an earlier text, so that leading spaces are kept.
    """

    def __init__(
        self, tokenizer: HasVocabulary, skip_special_tokens: bool = True, continues_text: bool = False
    ) -> None:
        vocabulary = tokenizer.vocabulary
        self._table = vocabulary.table
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._held = b""  # the first bytes of an incomplete character
        self._first_token = vocabulary.leading_space == "first_token" and not continues_text
        self._spaces_to_cut = 0 if continues_text else vocabulary.leading_cut

    def push(self, token_id: int) -> str:
        """Return the text that this token completes."""
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
        """Return what was held back. An incomplete character becomes one U+FFFD."""
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

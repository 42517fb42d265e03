"""MarkedVocabulary: the tokens of a vocabulary as a text that a mark ends, such as `</arg_value>`.

A client's grammar describes the text, and the model writes it as it is. The text must not contain the mark, because a parser
would end it there. A token that begins the mark may also be a part of the text: then both are followed, until one of them ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import llguidance
import numpy as np

from stoker.base.errors import InvalidRequest
from stoker.engine.process.grammars.input_text import Mask, allowed_pieces, crossings, ll_tokenizer, mask_of
from stoker.engine.process.grammars.text_endings import shortest_ending

_MAX_TOKEN_BYTES = 64  # of the tokens that `tokens_of` uses


class MarkedVocabulary:
    """What the matchers of text grammars share. `contents` is the text of each token, and empty for special tokens.

    `vocabulary` has the text of special tokens, too: the mark may be one.
    """

    def __init__(
        self, contents: Sequence[bytes], vocabulary: Sequence[bytes], vocab_size: int, opening: bytes, mark: bytes
    ) -> None:
        assert mark.count(mark[:1]) == 1, "a mark could begin in another one"
        self.mark = mark
        self.texts = vocabulary
        self.contents = contents
        pieces: dict[bytes, int] = {bytes([byte]): byte for byte in range(256)}
        for text in filter(None, contents):
            pieces.setdefault(text, len(pieces))
        self.stop_piece = len(pieces)
        self._piece_of = np.full(-(-vocab_size // 32) * 32, self.stop_piece, dtype=np.int32)
        self._piece_of[: len(contents)] = [pieces.get(text, self.stop_piece) for text in contents]
        self.tokenizer = ll_tokenizer(pieces)
        self.byte_tokenizer = ll_tokenizer(list(pieces)[:256])
        self._ids: dict[bytes, int] = {}
        for token_id, text in enumerate(contents):
            self._ids.setdefault(text, token_id)
        self._crossing = crossings(vocabulary, opening, vocab_size)
        self._completing, self._continuing = [], []
        in_mark = [(i, text) for i, text in enumerate(vocabulary) if text and (text[0] in mark or mark in text)]
        for written in range(len(mark)):
            rest = mark[written:]
            complete = [i for i, text in in_mark if text.startswith(rest) or mark in text]
            proceed = [i for i, text in in_mark if text.startswith(rest) or rest.startswith(text)]
            self._completing.append(mask_of(complete, vocab_size))
            self._continuing.append(mask_of(proceed, vocab_size))
        whole = next((i for i, text in enumerate(vocabulary) if text == mark), None)
        self.mark_ids: list[int] = (self.tokens_of(mark) or []) if whole is None else [whole]

    def follow(self, pieces: llguidance.LLMatcher, by_bytes: llguidance.LLMatcher) -> MarkedText:
        return MarkedText(self, pieces, by_bytes)

    def tokens_for(self, pieces: Mask, written: int) -> Mask:
        """Return the tokens of the pieces that are 1, without those that complete the mark."""
        mask = np.packbits(pieces[self._piece_of], bitorder="little").view(np.int32)
        return mask & ~self._completing[written]

    def continuing(self, written: int) -> Mask:
        """Return the tokens that go on with the mark, of which some bytes are written, or complete it."""
        return self._continuing[written]

    def crossing(self, rest: bytes) -> Mask:
        return self._crossing[rest]

    def tokens_of(self, text: bytes) -> list[int] | None:
        """Return tokens of a text, or None if it cannot be written."""
        token_ids: list[int] = []
        at = 0
        while at < len(text):
            for length in range(min(_MAX_TOKEN_BYTES, len(text) - at), 0, -1):
                if (token_id := self._ids.get(text[at : at + length])) is not None:
                    token_ids.append(token_id)
                    at += length
                    break
            else:
                return None
        return token_ids

    def check(self) -> None:
        if not self.mark_ids:
            raise InvalidRequest(
                f"this model's vocabulary cannot write {self.mark.decode()!r}, which ends the input of a custom tool; "
                "leave out the tool's 'format'",
                code="invalid_grammar",
            )


class MarkedText:
    """Follows a text through its grammar, up to the mark."""

    def __init__(
        self, vocabulary: MarkedVocabulary, pieces: llguidance.LLMatcher, by_bytes: llguidance.LLMatcher
    ) -> None:
        self._vocabulary = vocabulary
        self._pieces = pieces
        self._bytes = by_bytes
        self._words = np.zeros(-(-(vocabulary.stop_piece + 1) // 32), dtype=np.int32)
        self._is_text = True  # False: what is written can only be the mark
        self._written = 0  # bytes at the end that may be the start of the mark
        self._ended_before = False  # the text before them is complete
        self.rest: bytes | None = None

    @property
    def broken(self) -> bool:
        return bool(self._pieces.is_error() or self._bytes.is_error())

    def _ends(self) -> list[int]:
        """Return how many bytes of the mark are written: of one that was begun, and 0 if one may begin here."""
        begun = [self._written] if self._written and self._ended_before else []
        return [*begun, 0] if self._is_text and self._pieces.is_accepting() else begun

    def accept(self, token_id: int) -> bool:
        texts, mark = self._vocabulary.texts, self._vocabulary.mark
        text = texts[token_id] if token_id < len(texts) else b""
        if not text:
            return False
        ends = self._ends()
        for written in ends:
            if text.startswith(mark[written:]):
                self.rest = text[len(mark) - written :]
                return True
        if self._is_text and self._take(self._vocabulary.contents[token_id]):
            return True
        for written in ends:
            if mark.startswith(text, written):
                self._is_text, self._ended_before, self._written = False, True, written + len(text)
                return True
        return False

    def _take(self, content: bytes) -> bool:
        """Read more of the text. Returns False, without a change, if the grammar does not allow it."""
        mark = self._vocabulary.mark
        end = mark[: self._written] + content
        begun = max(end.rfind(mark[:1]), 0)
        begun_bytes = len(end) - begun if mark.startswith(end[begun:]) else 0
        if not content or mark in end or self._pieces.validate_tokens(list(content)) < len(content):
            return False
        before = max(len(content) - begun_bytes, 0)
        if not self._consume(content[:before]):
            return False
        if begun_bytes <= len(content):
            self._ended_before = bool(self._pieces.is_accepting())
        self._written = begun_bytes
        return self._consume(content[before:])

    def _consume(self, text: bytes) -> bool:
        pieces = list(text)
        return not pieces or bool(self._pieces.consume_tokens(pieces) and self._bytes.consume_tokens(pieces))

    def allowed(self) -> Mask:
        pieces = allowed_pieces(self._pieces, self._vocabulary.stop_piece, self._words)
        if not self._is_text:
            pieces[:] = 0
        mask = self._vocabulary.tokens_for(pieces, self._written)
        for written in self._ends():
            mask |= self._vocabulary.continuing(written)
        return mask

    def forced(self) -> list[int]:
        if not self._is_text:
            return self._rest_of_mark()
        if self._pieces.is_stopped():
            return self._vocabulary.mark_ids
        return self._vocabulary.tokens_of(bytes(self._pieces.compute_ff_bytes())) or []

    def ending(self) -> list[int] | None:
        if not self._is_text:
            return self._rest_of_mark()
        text = shortest_ending(self._bytes)
        tokens = None if text is None else self._vocabulary.tokens_of(text)
        return None if tokens is None else tokens + self._vocabulary.mark_ids

    def _rest_of_mark(self) -> list[int]:
        return self._vocabulary.tokens_of(self._vocabulary.mark[self._written :]) or []

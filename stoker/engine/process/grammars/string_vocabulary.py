"""StringVocabulary: the tokens of a vocabulary as the content of a JSON string.

A client's grammar describes a text. The model writes the text inside a JSON string, with escapes. So the grammar gets the text
that each token stands for: a backslash and an n are a newline. Many vocabularies have no token for both characters. There the
model writes a backslash, and then a token that begins with the n: such a token stands for another text after a backslash.
Tokens that are not written as a JSON encoder would write them stand for nothing, and cannot be sampled inside the string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np

from stoker.base.errors import InvalidRequest
from stoker.engine.process.grammars.input_text import Mask, allowed_pieces, crossings, ll_tokenizer, mask_of
from stoker.engine.process.grammars.text_endings import shortest_ending

_CONTENT = re.compile(rb'(?:[^"\\\x00-\x1f]|\\(?:["\\bfnrt]|u00[01][0-9a-f]))+')
_ESCAPE = re.compile(rb"\\(?:u00(..)|(.))", re.DOTALL)
_SHORT = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t"}
_ESCAPABLE = b'\n"\\\t'  # bytes that most texts have, and that need an escape
_MAX_TOKEN_BYTES = 64  # of the tokens that `tokens_of` uses


class StringVocabulary:
    """What the matchers of text grammars share. `vocabulary` is the text of each token; it is empty for special tokens.

    llguidance sees each different text once (a *piece*), also if several tokens stand for it. The pieces begin with all bytes.
    """

    def __init__(self, vocabulary: Sequence[bytes], vocab_size: int, opening: bytes) -> None:
        self._pieces: dict[bytes, int] = {bytes([byte]): byte for byte in range(256)}
        self._plain = _Contents(vocabulary, b"", self._pieces)
        self._escaped = _Contents(vocabulary, b"\\", self._pieces)
        self.stop_piece = len(self._pieces)
        self._plain.index(self._pieces, vocab_size)
        self._escaped.index(self._pieces, vocab_size)
        self.tokenizer = ll_tokenizer(self._pieces)
        self.byte_tokenizer = ll_tokenizer(list(self._pieces)[:256])
        self._backslash = next((i for i, token in enumerate(vocabulary) if token == b"\\"), None)
        self.after_quote = {i: token[1:] for i, token in enumerate(vocabulary) if token.startswith(b'"')}
        """What follows the quote, of each token that ends the string."""
        self.closing: Mask = mask_of(list(self.after_quote), vocab_size)
        self._crossing = crossings(vocabulary, opening, vocab_size)

    def follow(self, pieces: llguidance.LLMatcher, by_bytes: llguidance.LLMatcher) -> StringText:
        return StringText(self, pieces, by_bytes)

    def content(self, token_id: int, after_backslash: bool) -> tuple[bytes, bool] | None:
        """Return the text that a token stands for in a string, and True if it ends with a backslash that begins an escape.

        None: the token must not be in a string.
        """
        contents = self._escaped if after_backslash else self._plain
        if (text := contents.texts.get(token_id)) is not None:
            return text, False
        return None if (text := contents.dangling.get(token_id)) is None else (text, True)

    def tokens_for(self, pieces: np.ndarray[Any, Any], after_backslash: bool) -> Mask:
        """Return the tokens that stand for the pieces that are 1."""
        return (self._escaped if after_backslash else self._plain).allowed(pieces)

    def crossing(self, rest: bytes) -> Mask:
        return self._crossing[rest]

    def tokens_of(self, text: bytes, after_backslash: bool) -> list[int] | None:
        """Return tokens that stand for a text, or None if it cannot be written."""
        token_ids: list[int] = []
        at = 0
        while at < len(text):
            contents = self._escaped if after_backslash else self._plain
            after_backslash = False
            token_id, length = contents.longest(text, at)
            if token_id is None and contents is self._plain and self._backslash is not None:
                token_ids.append(self._backslash)
                token_id, length = self._escaped.longest(text, at)
            if token_id is None:
                return None
            token_ids.append(token_id)
            at += length
        return token_ids

    def check(self) -> None:
        """Raise InvalidRequest if a common character cannot be written in a string."""
        missing = [bytes([byte]) for byte in _ESCAPABLE if self.tokens_of(bytes([byte]), after_backslash=False) is None]
        if missing:
            raise InvalidRequest(
                f"this model's vocabulary cannot write {json.dumps(missing[0].decode())} in a JSON string, so that it "
                "cannot follow the grammar of a custom tool; leave out the tool's 'format'",
                code="invalid_grammar",
            )


class StringText:
    """Follows a text inside a JSON string through its grammar."""

    def __init__(
        self, vocabulary: StringVocabulary, pieces: llguidance.LLMatcher, by_bytes: llguidance.LLMatcher
    ) -> None:
        self._vocabulary = vocabulary
        self._pieces = pieces
        self._bytes = by_bytes
        self._words = np.zeros(-(-(vocabulary.stop_piece + 1) // 32), dtype=np.int32)
        self._after_backslash = False
        self.rest: bytes | None = None

    @property
    def broken(self) -> bool:
        return bool(self._pieces.is_error() or self._bytes.is_error())

    def accept(self, token_id: int) -> bool:
        if not self._after_backslash and (rest := self._vocabulary.after_quote.get(token_id)) is not None:
            self.rest = rest
            return True
        content = self._vocabulary.content(token_id, self._after_backslash)
        if content is None:
            return False
        text, self._after_backslash = list(content[0]), content[1]
        return not text or bool(self._pieces.consume_tokens(text) and self._bytes.consume_tokens(text))

    def allowed(self) -> Mask:
        pieces = allowed_pieces(self._pieces, self._vocabulary.stop_piece, self._words)
        mask = self._vocabulary.tokens_for(pieces, self._after_backslash)
        if not self._after_backslash and self._pieces.is_accepting():
            mask |= self._vocabulary.closing
        return mask

    def forced(self) -> list[int]:
        text = b"" if self._pieces.is_stopped() else bytes(self._pieces.compute_ff_bytes())
        return self._vocabulary.tokens_of(text, self._after_backslash) or []

    def ending(self) -> list[int] | None:
        text = shortest_ending(self._bytes)
        if text is None or (self._after_backslash and not text):
            return None
        return self._vocabulary.tokens_of(text, self._after_backslash)


class _Contents:
    """The texts that tokens stand for, in one of the two places: after a backslash (`before`), or not."""

    def __init__(self, vocabulary: Sequence[bytes], before: bytes, pieces: dict[bytes, int]) -> None:
        """Add the texts to `pieces`."""
        self.texts: dict[int, bytes] = {}
        self.dangling: dict[int, bytes] = {}  # of tokens that end with the backslash of an escape, without it
        for token_id, token in enumerate(vocabulary):
            written = before + token if token else b""
            if _CONTENT.fullmatch(written):
                self.texts[token_id] = _unescaped(written)
            elif written.endswith(b"\\") and (written == b"\\" or _CONTENT.fullmatch(written[:-1])):
                self.dangling[token_id] = _unescaped(written[:-1])
        self._ids: dict[bytes, int] = {}
        for token_id, text in self.texts.items():
            self._ids.setdefault(text, token_id)
            pieces.setdefault(text, len(pieces))
        for text in self.dangling.values():
            for byte in _ESCAPABLE:
                pieces.setdefault(text + bytes([byte]), len(pieces))

    def index(self, pieces: dict[bytes, int], vocab_size: int) -> None:
        """Look up the pieces of all tokens. Called when all pieces are known."""
        # Tokens that stand for nothing have the piece after the last one.
        self._piece_of = np.full(-(-vocab_size // 32) * 32, len(pieces), dtype=np.int32)
        self._piece_of[list(self.texts)] = [pieces[text] for text in self.texts.values()]
        self._dangling_ids = np.array(list(self.dangling), dtype=np.int64)
        followed = [[pieces[text + bytes([byte])] for byte in _ESCAPABLE] for text in self.dangling.values()]
        self._followed = np.array(followed, dtype=np.int64).reshape(-1, len(_ESCAPABLE))

    def allowed(self, pieces: np.ndarray[Any, Any]) -> Mask:
        """Return the tokens of the pieces that are 1. A backslash is allowed if an escape may follow."""
        bits = pieces[self._piece_of]
        bits[self._dangling_ids] = pieces[self._followed].any(axis=1)
        return np.packbits(bits, bitorder="little").view(np.int32)

    def longest(self, text: bytes, at: int) -> tuple[int | None, int]:
        """Return the token of the longest start of text[at:], and its length."""
        for length in range(min(_MAX_TOKEN_BYTES, len(text) - at), 0, -1):
            if (token_id := self._ids.get(text[at : at + length])) is not None:
                return token_id, length
        return None, 0


def _unescaped(written: bytes) -> bytes:
    return _ESCAPE.sub(_escaped_byte, written)


def _escaped_byte(escape: re.Match[bytes]) -> bytes:
    if escape[1] is not None:
        return bytes([int(escape[1], 16)])
    return _SHORT.get(escape[2], escape[2])

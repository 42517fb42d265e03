"""TextGrammars: compiles the grammars of custom tools with llguidance, and follows texts through them.

llguidance parses Lark and regular expressions itself. Its automata are built while a text is matched, so that the limits below
bound the time of each step and the memory of each grammar.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import llguidance
import numpy as np

from stoker.base.errors import InvalidRequest
from stoker.engine.process.grammars.string_vocabulary import Mask, StringVocabulary
from stoker.engine.process.grammars.text_endings import shortest_ending
from stoker.sched.request import TextGrammar

# Without this option, only one way to write a forced text in tokens is allowed.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'  # at the end, so that errors name the client's lines


def _lark_of_regex(pattern: str) -> str:
    lark: str = json.loads(llguidance.LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
    return lark


# How each syntax becomes a grammar of llguidance. The library converts and parses it.
SYNTAXES: Mapping[Literal["lark", "regex"], Callable[[str], str]] = {
    "lark": llguidance.LLMatcher.grammar_from_lark,
    "regex": _lark_of_regex,
}
_NUM_BYTES = 2 << 20  # an estimate of a grammar's memory; the library does not report it


@dataclass(frozen=True, slots=True)
class PreparedText:
    """A compiled grammar of a text. Matchers are copies of the first one."""

    vocabulary: StringVocabulary
    pieces: llguidance.LLMatcher
    by_bytes: llguidance.LLMatcher
    num_bytes: int = _NUM_BYTES

    def matcher(self) -> TextMatcher:
        return TextMatcher(self.vocabulary, self.pieces.deep_copy(), self.by_bytes.deep_copy())


@dataclass(frozen=True, slots=True)
class PreparedInput:
    """The compiled grammar of the input of a custom tool. `begin` is the text that begins a call to it."""

    begin: bytes
    text: PreparedText


class TextMatcher:
    """Follows a text inside a JSON string through its grammar."""

    def __init__(
        self, vocabulary: StringVocabulary, pieces: llguidance.LLMatcher, by_bytes: llguidance.LLMatcher
    ) -> None:
        self._vocabulary = vocabulary
        self._pieces = pieces
        self._bytes = by_bytes
        self._allowed_pieces = np.zeros(-(-(vocabulary.stop_piece + 1) // 32), dtype=np.int32)
        self.after_backslash = False

    @property
    def broken(self) -> bool:
        """True if the grammar reached one of its limits. Then it cannot continue."""
        return bool(self._pieces.is_error() or self._bytes.is_error())

    def accept(self, token_id: int) -> bool:
        """Advance by a token that does not end the string. Return False if the grammar does not allow it."""
        content = self._vocabulary.content(token_id, self.after_backslash)
        if content is None:
            return False
        text, self.after_backslash = list(content[0]), content[1]
        return not text or bool(self._pieces.consume_tokens(text) and self._bytes.consume_tokens(text))

    def allowed(self) -> Mask:
        """Return the tokens that may come next, among them those that end the string."""
        if self._pieces.is_stopped():  # no more text is possible
            self._allowed_pieces[:] = 0
        else:
            self._pieces.unsafe_compute_mask_ptr(self._allowed_pieces.ctypes.data, self._allowed_pieces.nbytes)
        mask = self._vocabulary.tokens_for(self._allowed_pieces, self.after_backslash)
        if not self.after_backslash and self._pieces.is_accepting():
            mask |= self._vocabulary.closing
        return mask

    def forced(self) -> list[int]:
        """Return tokens of the text that must come next. Often there is none."""
        text = b"" if self._pieces.is_stopped() else bytes(self._pieces.compute_ff_bytes())
        return self._vocabulary.tokens_of(text, self.after_backslash) or []

    def ending(self) -> list[int] | None:
        """Return tokens of a short text that completes this one, or None if none was found."""
        text = shortest_ending(self._bytes)
        if text is None or (self.after_backslash and not text):
            return None
        return self._vocabulary.tokens_of(text, self.after_backslash)


def compile_text(grammar: TextGrammar, vocabulary: StringVocabulary) -> PreparedText:
    """Compile a grammar. Raises InvalidRequest, with the place of the error in the grammar."""
    vocabulary.check()
    source = SYNTAXES[grammar.syntax](grammar.definition) + _OPTIONS
    pieces, by_bytes = (
        _first_matcher(grammar.syntax, source, tokenizer)
        for tokenizer in (vocabulary.tokenizer, vocabulary.byte_tokenizer)
    )
    return PreparedText(vocabulary, pieces, by_bytes)


def _first_matcher(syntax: str, source: str, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=_limits())
    matcher.compute_bitmask()  # builds the first states, which may reach a limit
    if matcher.is_error():
        reason = " ".join(matcher.get_error().split())[:500]
        raise InvalidRequest(f"not a usable {syntax} grammar: {reason}", code="invalid_grammar")
    return matcher


def _limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        max_grammar_size=200_000,
        max_lexer_states=20_000,  # of about 1 KB each
        max_items_in_row=1_000,
        step_max_items=20_000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
    )

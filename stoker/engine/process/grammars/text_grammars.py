"""Compile the grammars of custom tools with llguidance.

llguidance parses Lark and regular expressions itself. Its automata are built while a text is matched, so that the limits below
bound the time of each step and the memory of each grammar.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import llguidance

from stoker.base.errors import InvalidRequest
from stoker.engine.process.grammars.input_text import InputText, InputVocabulary
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

    vocabulary: InputVocabulary
    pieces: llguidance.LLMatcher
    by_bytes: llguidance.LLMatcher
    num_bytes: int = _NUM_BYTES

    def matcher(self) -> InputText:
        return self.vocabulary.follow(self.pieces.deep_copy(), self.by_bytes.deep_copy())


@dataclass(frozen=True, slots=True)
class PreparedInput:
    """The compiled grammar of the input of a custom tool."""

    begin: bytes  # the text that begins a call to the tool
    opening: bytes  # the text right before the input
    is_string: bool  # the input is in a JSON string
    text: PreparedText


def compile_text(grammar: TextGrammar, vocabulary: InputVocabulary) -> PreparedText:
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

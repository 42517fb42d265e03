"""Texts that a mark ends, with a small vocabulary in which tokens overlap with the mark."""

from __future__ import annotations

import itertools
import random
import re

import numpy as np
import pytest

from stoker.base.errors import InvalidRequest
from stoker.engine.process.grammars.input_text import InputText
from stoker.engine.process.grammars.marked_vocabulary import MarkedVocabulary
from stoker.engine.process.grammars.text_grammars import PreparedText, compile_text
from stoker.sched.request import TextGrammar

MARK = b"</v>"
TEXTS = [*(bytes([byte]) for byte in range(256)), b"</", b"a<", b"/v", b">\n", b"v>", b"<a", b"x</v>", b"</v>b", MARK]
SPECIAL_ID = len(TEXTS) - 1  # the whole mark
CONTENTS = [*TEXTS[:SPECIAL_ID], b""]
VOCABULARY = MarkedVocabulary(CONTENTS, TEXTS, len(TEXTS), b"<v>", MARK)
PATTERNS = ["[a</v>]*", "(a|<)+", "a?</?v?", "(ab)+", "[^x]*", "", "a<+", "(</v|a)*>?"]


def prepared(pattern: str) -> PreparedText:
    return compile_text(TextGrammar("regex", pattern), VOCABULARY)


def allowed_ids(text: InputText) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(text.allowed().view(np.uint8), bitorder="little")).tolist()
    return found


def takes(grammar: PreparedText, written: bytes) -> bool:
    """Return True if every byte is allowed, and the input ends with the last one."""
    text = grammar.matcher()
    for byte in written:
        if text.rest is not None or byte not in allowed_ids(text):
            return False
        assert text.accept(byte)
    return text.rest is not None


@pytest.mark.parametrize("pattern", PATTERNS)
def test_exactly_the_texts_of_the_grammar_are_taken(pattern: str) -> None:
    grammar = prepared(pattern)
    for length in range(4):
        for chars in itertools.product("a<b", repeat=length):
            content = "".join(chars)
            fits = re.fullmatch(pattern, content) is not None
            assert takes(grammar, content.encode() + MARK) is fits, content
    for content in ("</", "</v", "a</", "a</v", "<<", "</v</v", "<</v"):
        fits = re.fullmatch(pattern, content) is not None
        assert takes(grammar, content.encode() + MARK) is fits, content


@pytest.mark.parametrize("pattern", PATTERNS)
def test_any_allowed_tokens_write_a_text_that_fits(pattern: str) -> None:
    grammar, dice = prepared(pattern), random.Random(pattern)
    for _ in range(200):
        text, written = grammar.matcher(), b""
        while text.rest is None:
            allowed = allowed_ids(text)
            likely = [token_id for token_id in allowed if token_id > 255 or TEXTS[token_id] in b"<>/vab\n"]
            ending = text.ending()
            assert ending
            token_id = ending[0] if len(written) > 12 else dice.choice(likely or allowed)
            assert token_id in allowed
            assert text.accept(token_id)
            written += TEXTS[token_id]
        content, mark, rest = written.partition(MARK)
        assert mark
        assert rest == text.rest
        assert re.fullmatch(pattern, content.decode("latin-1"), re.DOTALL), written


def test_the_mark_may_be_one_special_token() -> None:
    text = prepared("a+").matcher()
    assert SPECIAL_ID not in allowed_ids(text)
    assert text.accept(ord("a"))
    assert SPECIAL_ID in allowed_ids(text)
    assert text.accept(SPECIAL_ID)
    assert text.rest == b""


def test_tokens_that_are_not_allowed_are_refused() -> None:
    text = prepared("a+").matcher()
    for token_id in (ord("b"), ord("<"), SPECIAL_ID, len(TEXTS) + 5, TEXTS.index(b"x</v>")):
        assert not text.accept(token_id)
    assert text.accept(ord("a"))
    assert not text.broken


def test_a_vocabulary_without_the_mark_is_refused() -> None:
    without = MarkedVocabulary([b"a", b"b"], [b"a", b"b"], 2, b"<v>", MARK)
    with pytest.raises(InvalidRequest, match="</v>"):
        compile_text(TextGrammar("regex", "a"), without)

"""Decoding token by token gives the same text as decoding all tokens, and never an incomplete character."""

from __future__ import annotations

import functools

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from text_samples import sentence_piece

from stoker.text.detokenizer import Detokenizer
from stoker.text.tokenizer import Tokenizer


@settings(max_examples=300, deadline=None, print_blob=True)
@given(data=st.data(), skip=st.booleans())
def test_decoding_token_by_token_equals_decoding_all_at_once(
    raw: tokenizers.Tokenizer, data: st.DataObject, skip: bool
) -> None:
    tokenizer = _shared(raw)
    # Any ids: most of them together are not valid UTF-8.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    text = "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()
    assert text == raw.decode(ids, skip_special_tokens=skip)
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)


@functools.cache
def _shared(raw: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(raw)


def test_an_incomplete_character_is_held_back(tokenizer: Tokenizer) -> None:
    byte_ids = [
        next(t for t in range(tokenizer.vocab_size) if tokenizer.token_bytes(t) == bytes([b])) for b in "🦊".encode()
    ]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token) for token in byte_ids] == ["", "", "", "🦊"]
    assert [detokenizer.push(token) for token in byte_ids[:2]] == ["", ""]
    assert detokenizer.flush() == "\ufffd"


def test_sentence_piece_drops_its_own_leading_space() -> None:
    for scheme in ("always", "first", "never"):
        raw = sentence_piece(scheme)
        tokenizer = Tokenizer(raw)
        for text in ("The quick brown fox", "quick  fox ", "狐 fox", " x"):
            ids = tokenizer.encode(text)
            detokenizer = Detokenizer(tokenizer)
            pushed = "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()
            assert pushed == raw.decode(ids) == tokenizer.decode(ids)


def test_metaspace_decoder_drops_the_first_tokens_space() -> None:
    for scheme in ("always", "first", "never"):
        raw = sentence_piece(scheme)
        raw.decoder = tokenizers.decoders.Metaspace(prepend_scheme=scheme)
        tokenizer = Tokenizer(raw)
        for text in ("The quick brown fox", " x", "   The"):
            ids = tokenizer.encode(text)
            detokenizer = Detokenizer(tokenizer)
            assert "".join(detokenizer.push(token) for token in ids) + detokenizer.flush() == raw.decode(ids)

"""Fixtures of the text tests."""

from __future__ import annotations

import pytest
import tokenizers
from text_samples import byte_level

from stoker.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def raw() -> tokenizers.Tokenizer:
    return byte_level()


@pytest.fixture
def tokenizer(raw: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(raw, eos_token_ids=[raw.token_to_id("<|im_end|>")], eos_token="<|im_end|>")

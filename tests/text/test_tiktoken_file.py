"""A tokenizer in a tiktoken file gives the ids that the tiktoken library gives."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer

from stoker.base.errors import ModelFilesError
from stoker.text.tiktoken_file import PATTERNS
from stoker.text.tokenizer import Tokenizer
from stoker.text.vocabulary import byte_level_alphabet

PATTERN = PATTERNS["TikTokenTokenizer"]
WORDS = (
    "Hello",
    "World",
    "don't",
    "I'LL",
    "中文",
    "汉字abc",
    "北京市",
    "été",
    "ÀÉ",
    "ñandú",
    "12345",
    "3.14",
    "\t",
    "\n\n",
    " ",
    "  ",
    "🙂",
    "->",
    "x_y",
    "ǅ",
    "한국어",
    "日本語です",
    "\r\n",
    "...",
    "foo(bar)",
    "\u00a0",
)


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """Train a small byte-level BPE. tiktoken's ranks are the bytes and then the merges in their order."""
    raw = RawTokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = byte_level_alphabet()
    dice = random.Random(0)
    texts = ["".join(dice.choices(WORDS, k=20)) for _ in range(300)]
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=list(alphabet.values()), show_progress=False)
    raw.train_from_iterator(texts, trainer)
    back = {char: byte for byte, char in alphabet.items()}
    merges = [left + right for left, right in json.loads(raw.to_str())["model"]["merges"]]
    tokens = dict.fromkeys([bytes([byte]) for byte in range(256)] + [bytes(back[c] for c in one) for one in merges])
    return {token: rank for rank, token in enumerate(tokens)}


def write(folder: Path, ranks: dict[bytes, int], **settings: Any) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    first = len(ranks)
    added = {
        str(first): {"content": "[BOS]", "special": True},
        str(first + 2): {"content": "<|im_end|>", "special": True},
        str(first + 9): {"content": "<think>", "special": False},
    }
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | settings))
    return folder


def test_ids_equal_those_of_tiktoken(ranks: dict[bytes, int], tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, ranks))
    reference = tiktoken.Encoding("test", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    dice = random.Random(1)
    for _ in range(400):
        text = "".join(dice.choices(WORDS, k=dice.randint(0, 12)))
        ids = tokenizer.encode(text)
        assert ids == reference.encode_ordinary(text), text
        assert tokenizer.decode(ids) == text
    assert len(max(ranks, key=len)) > 3


def test_special_tokens_have_the_ids_of_the_config(ranks: dict[bytes, int], tmp_path: Path) -> None:
    tokenizer, first = Tokenizer.from_folder(write(tmp_path, ranks)), len(ranks)
    assert tokenizer.encode("[BOS]a<|im_end|><think>") == [first, ranks[b"a"], first + 2, first + 9]
    assert tokenizer.eos_token_ids == (first + 2,)
    assert tokenizer.vocab_size == first + 256
    assert first + 9 not in tokenizer.special_ids
    assert {first, first + 1, first + 2} <= tokenizer.special_ids


@pytest.mark.parametrize(
    ("settings", "broken", "message"),
    [
        ({"tokenizer_class": "OtherTokenizer"}, None, "OtherTokenizer"),
        ({"added_tokens_decoder": {"5": {"content": "x"}}}, None, "added_tokens_decoder\\['5'\\]"),
        ({}, "!!! 0\n", "line 1"),
        ({}, "YQ== 1\n", "line 1"),
        ({}, "YQ== 0\n", "each byte"),
    ],
)
def test_a_damaged_file_is_named(
    ranks: dict[bytes, int], tmp_path: Path, settings: dict[str, Any], broken: str | None, message: str
) -> None:
    write(tmp_path, ranks, **settings)
    if broken is not None:
        (tmp_path / "tiktoken.model").write_text(broken)
    with pytest.raises(ModelFilesError, match=message):
        Tokenizer.from_folder(tmp_path)

"""Tiny tokenizers with the properties of real ones: single digits, byte-level BPE, ChatML marks."""

from __future__ import annotations

import json

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's what they'll do, isn't it?",
    "def add(left: int, right: int) -> int:\n    return left + right\n\n\nprint(add(1, 2026))\n",
    '{"name": "search", "arguments": {"query": "weather in Zürich", "days": 3}}',
    "Füchse springen über faule Hunde. 狐は犬を飛び越える。 🦊🐶",
] * 5
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]


def byte_level(extra: list[AddedToken] | None = None) -> tokenizers.Tokenizer:
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False))
    raw.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS[:3]])
    raw.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS[3:]])
    raw.add_tokens(extra or [])
    return raw


def sentence_piece(prepend_scheme: str) -> tokenizers.Tokenizer:
    raw = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", *bytes_], show_progress=False)
    raw.train_from_iterator(CORPUS[:3], trainer)
    # Real byte tokens are part of the vocabulary: only the trainer makes them added ones.
    spec = json.loads(raw.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["content"].startswith("<0x")]
    raw = tokenizers.Tokenizer.from_str(json.dumps(spec))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS[:3]])
    return raw

"""A small model's text files: byte-level BPE, ChatML, a template that thinks unless told not to."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

CORPUS = ["The quick brown fox, 2026: def add(a, b):\n    return a + b\n", '{"name": "search"}', "Füchse 🦊"] * 5
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}{{ reasoning_effort or '' }}"
)


def make_folder(path: Path) -> Path:
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False))
    marks = [AddedToken(mark, special=True, normalized=False) for mark in ("<|im_start|>", "<|im_end|>", "<think>")]
    raw.add_special_tokens(marks)
    raw.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": THINKING}))
    (path / "chat_template.jinja").write_text(THINKING)
    return path

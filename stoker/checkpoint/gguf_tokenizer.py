"""Convert GGUF metadata to tokenizer.json and tokenizer_config.json, for byte-level BPE tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer

from stoker.base.errors import ModelFilesError
from stoker.checkpoint.gguf_file import GgufFile, damaged

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_ROLES = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}


def _regex_split(digits: str) -> PreTokenizer:
    """Return GPT-4's pre-tokenizer. `digits` is the pattern for digits that stay together."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _single_digits() -> PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


@dataclass(frozen=True)
class WordSplit:
    """How a model family splits text into words before BPE. `tokenizer.ggml.pre` is its name."""

    pre_tokenizer: Callable[[], PreTokenizer]
    nfc: bool = False  # the text is normalized to NFC first
    whole_words: bool = False  # a word that is a token itself is used without merges
    adds_bos: bool = False  # the default if the file does not say


SPLITS = {
    "smollm": WordSplit(_single_digits),
    "qwen2": WordSplit(lambda: _regex_split(r"\p{N}"), nfc=True),
    "llama-bpe": WordSplit(lambda: _regex_split(r"\p{N}{1,3}"), whole_words=True, adds_bos=True),
}


def build_tokenizer(file: GgufFile) -> Tokenizer:
    split = _split(file)
    tokens = file.strings("tokenizer.ggml.tokens")
    kinds = file.get("tokenizer.ggml.token_type", list)
    merges = [
        (left, right) for left, _, right in (merge.partition(" ") for merge in file.strings("tokenizer.ggml.merges"))
    ]
    vocab = {token: number for number, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(kinds) != len(tokens):
        raise damaged(
            file.path, f"it has {len(tokens)} tokens, {len(vocab)} different tokens and {len(kinds)} token types"
        )
    if wrong := [merge for merge in merges if not {*merge, "".join(merge)} <= vocab.keys()]:
        raise damaged(
            file.path, f"{len(wrong)} of its merges use or give something that is not a token, such as {wrong[0]!r}"
        )
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=split.whole_words))
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if _adds_bos(file):
        tokenizer.post_processor = _bos_first(file, tokens)
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, its_kind in zip(tokens, kinds, strict=True)
            if its_kind == kind
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    return tokenizer


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    tokens = file.strings("tokenizer.ggml.tokens")
    ids = {role: file.find(f"tokenizer.ggml.{name}_token_id", int) for name, role in _ROLES.items()}
    if outside := {role: number for role, number in ids.items() if number is not None and number >= len(tokens)}:
        raise damaged(file.path, f"it has {len(tokens)} tokens, but its special tokens are {outside}")
    named = {f"{role}_token": None if number is None else tokens[number] for role, number in ids.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "add_bos_token": _adds_bos(file),
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.get(f"{file.get('general.architecture', str)}.context_length", int),
        "chat_template": file.find("tokenizer.chat_template", str),
    }


def _split(file: GgufFile) -> WordSplit:
    model = file.get("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise ModelFilesError(
            f"{file.path}: its tokenizer model {model!r} is not supported in GGUF files, only byte-level BPE ('gpt2'). "
            "Use the model's original folder with tokenizer.json"
        )
    name = file.find("tokenizer.ggml.pre", str) or "default"
    if name not in SPLITS:
        raise ModelFilesError(
            f"{file.path}: its pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported, only "
            f"{', '.join(SPLITS)}. Use the model's original folder with tokenizer.json"
        )
    return SPLITS[name]


def _adds_bos(file: GgufFile) -> bool:
    configured = file.find("tokenizer.ggml.add_bos_token", bool)
    return _split(file).adds_bos if configured is None else configured


def _bos_first(file: GgufFile, tokens: list[str]) -> processors.PostProcessor:
    number = file.get("tokenizer.ggml.bos_token_id", int)
    if number >= len(tokens):
        raise damaged(file.path, f"it has {len(tokens)} tokens, but its BOS token has the id {number}")
    bos = tokens[number]
    try:
        return processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, number)]
        )
    except ValueError as error:
        raise damaged(file.path, f"its BOS token is {bos!r}") from error

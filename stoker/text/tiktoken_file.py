"""Read a tokenizer that ships as `tiktoken.model`: the bytes and the rank of each token, one per line.

The file says neither how text is split into words nor which special tokens there are. The first is known by the tokenizer's class
in tokenizer_config.json, the second is in that file.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from stoker.base.errors import ModelFilesError
from stoker.text.folder import token_text
from stoker.text.vocabulary import byte_level_alphabet

FILE_NAME = "tiktoken.model"
_NUM_RESERVED = 256  # ids of special tokens after the last rank
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_NOT_HAN, _CONTRACTION = r"&&[^\p{Han}]", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# How each tokenizer class splits text into words.
PATTERNS = {
    # Kimi: Chinese characters are words of their own, apart from other letters.
    "TikTokenTokenizer": "|".join(
        (
            r"[\p{Han}]+",
            rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NOT_HAN}]*[{_LOWER}{_NOT_HAN}]+{_CONTRACTION}",
            rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NOT_HAN}]+[{_LOWER}{_NOT_HAN}]*{_CONTRACTION}",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    ),
}


def read_tiktoken(path: Path, text: str, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    """Return the tokenizer of a file with this text. `settings` is tokenizer_config.json."""
    name = str(settings.get("tokenizer_class"))
    if name not in PATTERNS:
        raise ModelFilesError(
            f"{path}: the tokenizer class {name!r} (tokenizer_class in tokenizer_config.json) is not supported with this file, "
            f"only {', '.join(PATTERNS)}. Load it with transformers' AutoTokenizer and write tokenizer.json with save_pretrained()"
        )
    ranks = _ranks(path, text)
    letters = byte_level_alphabet()
    vocab = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    model = models.BPE(vocab=vocab, merges=_merges(ranks, letters), ignore_merges=True)
    raw = tokenizers.Tokenizer(model)
    split = pre_tokenizers.Split(Regex(PATTERNS[name]), behavior="isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    raw.decoder = decoders.ByteLevel()
    raw.add_tokens(_special_tokens(path, settings.get("added_tokens_decoder"), len(ranks)))
    return raw


def _ranks(path: Path, text: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        encoded, _, rank = line.partition(" ")
        try:
            token = base64.b64decode(encoded, validate=True)
            if int(rank) != len(ranks) or not token or token in ranks:
                raise ValueError("the ranks must be 0, 1, 2, …, each for another token")
        except (ValueError, binascii.Error) as broken:
            raise ModelFilesError(
                f"{path} is damaged in line {number} ({broken}): download the model again"
            ) from broken
        ranks[token] = len(ranks)
    if len(ranks) < 256 or any(bytes([byte]) not in ranks for byte in range(256)):
        raise ModelFilesError(f"{path} is damaged: it must have a token for each byte. Download the model again")
    return ranks


def _merges(ranks: dict[bytes, int], letters: dict[int, str]) -> list[tuple[str, str]]:
    """Return all ways to make a token of two others, by the token's rank. tiktoken merges the pair with the lowest rank."""
    merges = []
    for token in ranks:
        written = "".join(letters[byte] for byte in token)
        cuts = [cut for cut in range(1, len(token)) if token[:cut] in ranks and token[cut:] in ranks]
        cuts.sort(key=lambda cut: (ranks[token[:cut]], ranks[token[cut:]]))
        merges += [(written[:cut], written[cut:]) for cut in cuts]
    return merges


def _special_tokens(path: Path, configured: Any, num_ranks: int) -> list[AddedToken]:
    """Return the tokens after the last rank, in the order of their ids. Ids without a name are reserved."""
    named: dict[int, AddedToken] = {}
    for token_id, entry in (configured if isinstance(configured, dict) else {}).items():
        content = token_text(entry)
        if content is None or not str(token_id).isdecimal() or int(token_id) < num_ranks:
            raise ModelFilesError(
                f"{path.parent / 'tokenizer_config.json'}: added_tokens_decoder[{token_id!r}] is not a token after the "
                f"{num_ranks} of {FILE_NAME}: the two files are from different models"
            )
        special = bool(entry.get("special", False)) if isinstance(entry, dict) else True
        named[int(token_id)] = AddedToken(content, special=special, normalized=False)
    end = max([num_ranks + _NUM_RESERVED - 1, *named]) + 1
    if end > num_ranks + 4 * _NUM_RESERVED:
        raise ModelFilesError(f"{path.parent / 'tokenizer_config.json'}: the token id {end - 1} is too large")
    reserved = (AddedToken(f"<|reserved_token_{i}|>", special=True, normalized=False) for i in range(num_ranks, end))
    return [named.get(token_id, token) for token_id, token in zip(range(num_ranks, end), reserved, strict=True)]

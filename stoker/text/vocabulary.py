"""What each token id is in bytes, and how a tokenizer joins tokens into text.

It knows the two families of decoders: byte-level BPE and SentencePiece-like. It does not know how text becomes tokens.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any, Literal

from stoker.base.errors import ModelFilesError

# What happens to spaces at the very beginning of a decoded text: nothing; some are cut; the first token has none.
LeadingSpace = Literal["keep", "cut", "first_token"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`table[id]` are the token's bytes; ids without a token have none."""

    table: tuple[bytes, ...]
    leading_space: LeadingSpace
    leading_cut: int  # how many leading spaces "cut" takes away at most

    def bytes_of(self, token_id: int) -> bytes:
        return self.table[token_id] if 0 <= token_id < len(self.table) else b""


def build_vocabulary(vocab: dict[str, int], added: dict[int, str], decoder: dict[str, Any] | None) -> Vocabulary:
    """`vocab` has the model's tokens, `added` the texts of added ones, which are in no alphabet but their own."""
    steps = _steps(decoder)
    kinds = [str(step.get("type")) for step in steps]
    table = [b""] * (max([*vocab.values(), *added], default=-1) + 1)
    leading_space: LeadingSpace = "keep"
    leading_cut = 0
    if "ByteLevel" in kinds:
        letters = dict.fromkeys(range(256), sys.maxunicode)  # beyond any byte, but for the alphabet's own
        letters |= {ord(char): byte for byte, char in byte_level_alphabet().items()}
        for token, token_id in vocab.items():
            try:
                table[token_id] = token.translate(letters).encode("latin-1")
            except UnicodeEncodeError:
                # A token with a letter outside the alphabet stands for its own text, as in `tokenizers`.
                table[token_id] = token.encode()
    else:
        space, leading_space, leading_cut = _sentence_piece_rules(steps)
        for token, token_id in vocab.items():
            byte_token = _BYTE_TOKEN.fullmatch(token) if "ByteFallback" in kinds else None
            table[token_id] = bytes([int(byte_token[1], 16)]) if byte_token else token.replace(space, " ").encode()
    for token_id, text in added.items():
        table[token_id] = text.encode()
    return Vocabulary(tuple(table), leading_space, leading_cut)


def byte_level_alphabet() -> dict[int, str]:
    """Byte -> the character that byte-level BPE writes for it: itself where printable, else one from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in alphabet:
            alphabet[byte] = chr(256 + len(alphabet) - len(printable))
    return alphabet


def _sentence_piece_rules(steps: list[dict[str, Any]]) -> tuple[str, LeadingSpace, int]:
    space, leading_cut = "▁", 0
    leading_space: LeadingSpace = "keep"
    for step in steps:
        kind = step.get("type")
        if kind == "Metaspace":
            space = step.get("replacement", space)
            # Older files say add_prefix_space where newer ones name a scheme.
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
            leading_space = "keep" if scheme == "never" else "first_token"
        elif kind == "Replace" and step.get("content") == " ":
            space = (step.get("pattern") or {}).get("String", space)
        elif kind == "Strip" and step.get("content") == " ":
            leading_space, leading_cut = "cut", int(step.get("start", 0))
        elif kind not in ("ByteFallback", "Fuse"):
            raise ModelFilesError(
                f"tokenizer.json: its decoder has a step of type {kind!r}; known are ByteLevel, Metaspace, Replace by "
                "a space, Strip of spaces, ByteFallback and Fuse"
            )
    return space, leading_space, leading_cut


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        raise ModelFilesError("tokenizer.json has no decoder: token ids cannot be turned into text")
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]

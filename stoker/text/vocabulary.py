"""The bytes of each token id, and the rules by which a tokenizer joins tokens to text.

Two kinds of decoders are supported: byte-level BPE and SentencePiece. This module does not know how text becomes tokens.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any, Literal

from stoker.base.errors import ModelFilesError

# Spaces at the start of a decoded text: all are kept; some are removed; all of the first token are removed.
LeadingSpace = Literal["keep", "cut", "first_token"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`table[id]` are the bytes of a token; b"" for ids without a token."""

    table: tuple[bytes, ...]
    leading_space: LeadingSpace
    leading_cut: int  # the maximum number of leading spaces that "cut" removes

    def bytes_of(self, token_id: int) -> bytes:
        return self.table[token_id] if 0 <= token_id < len(self.table) else b""


def build_vocabulary(vocab: dict[str, int], added: dict[int, str], decoder: dict[str, Any] | None) -> Vocabulary:
    """Build the table from the model's tokens (`vocab`) and the added tokens, whose text is not in the byte-level alphabet."""
    steps = _steps(decoder)
    kinds = [str(step.get("type")) for step in steps]
    table = [b""] * (max([*vocab.values(), *added], default=-1) + 1)
    leading_space: LeadingSpace = "keep"
    leading_cut = 0
    if "ByteLevel" in kinds:
        letters = dict.fromkeys(range(256), sys.maxunicode)  # not encodable in latin-1, except for the alphabet below
        letters |= {ord(char): byte for byte, char in byte_level_alphabet().items()}
        for token, token_id in vocab.items():
            try:
                table[token_id] = token.translate(letters).encode("latin-1")
            except UnicodeEncodeError:
                # A token with a character outside of the alphabet is its own text, as in `tokenizers`.
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
    """Return the character of each byte in byte-level BPE: itself if printable, else one from U+0100 on."""
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
            # Older files have add_prefix_space instead of prepend_scheme.
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
            leading_space = "keep" if scheme == "never" else "first_token"
        elif kind == "Replace" and step.get("content") == " ":
            space = (step.get("pattern") or {}).get("String", space)
        elif kind == "Strip" and step.get("content") == " ":
            leading_space, leading_cut = "cut", int(step.get("start", 0))
        elif kind not in ("ByteFallback", "Fuse"):
            raise ModelFilesError(
                f"tokenizer.json: a decoder of type {kind!r} is not supported, only ByteLevel, Metaspace, Replace with a space, "
                "Strip of spaces, ByteFallback and Fuse"
            )
    return space, leading_space, leading_cut


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        raise ModelFilesError("tokenizer.json has no decoder: token ids cannot be turned into text")
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]

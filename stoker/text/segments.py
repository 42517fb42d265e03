"""Split a text into segments that can be tokenized separately, and cache the token ids of each segment.

Why this is exact: a tokenizer first finds the added tokens (such as `<|im_end|>`) in the raw text. Then it normalizes,
pre-tokenizes and merges each part between them separately. So a text can be split right before an added token, if the match of
that token does not depend on the text to its left: it is matched in the raw text (`normalized` is false), it does not consume
spaces (`lstrip`), and no token requires word borders (`single_word`). A split is made only where it is proven to be exact.

This module knows the format of tokenizer.json. It does not tokenize.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# Pre-tokenizer expressions in which a newline between two printable ASCII characters always ends a piece, or is one itself.
# The first one is GPT-2's, which ByteLevel uses by default.
_NEWLINE_ENDS_PIECE = frozenset(
    {
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
_SETTLED_NEWLINE = re.compile(r"[!-~]\n(?=[!-~])")
_LINES_CHARS = 2048  # a longer segment is split at the first such newline after this number of characters
_WINDOW_CHARS = 1 << 16  # searched for added tokens in one call


@dataclass(frozen=True, slots=True)
class AddedToken:
    """The properties of an added token in tokenizer.json."""

    content: str
    normalized: bool
    lstrip: bool
    rstrip: bool
    single_word: bool


class Splitter:
    """Splits a text so that the concatenated token ids of the segments are the token ids of the text."""

    def __init__(self, added: Sequence[AddedToken], newline_settles: bool) -> None:
        raw = [token for token in added if token.content and not token.normalized]
        # Longest first: then the expression finds the leftmost and longest match, like `tokenizers`. It includes tokens at which
        # the text may not be split, because they can overlap the start of one at which it may.
        contents = sorted({token.content for token in raw}, key=len, reverse=True)
        exact = bool(contents) and not any(token.single_word for token in raw)
        self._matches = re.compile("|".join(map(re.escape, contents))) if exact else None
        self._longest = max(map(len, contents), default=0)
        self._cut_before = frozenset(token.content for token in raw if _is_plain(token))
        spaced = any(t.lstrip or t.rstrip or t.single_word or "\n" in t.content for t in added)
        self._cut_lines = newline_settles and not spaced

    def split(self, text: str) -> list[str]:
        borders = [0]
        if self._matches is not None:
            for match in self._found(self._matches, text):
                if match.start() > borders[-1] and match.group() in self._cut_before:
                    borders.append(match.start())
        borders.append(len(text))
        pieces: list[str] = []
        for start, end in itertools.pairwise(borders):
            if self._cut_lines and end - start > _LINES_CHARS:
                pieces.extend(_lines(text, start, end))
            elif end > start:
                pieces.append(text[start:end])
        return pieces

    def _found(self, matches: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
        """Yield the same as `matches.finditer(text)`, but search a limited window at a time.

        A search holds the interpreter lock. In a long text without a match, other threads would wait for it.
        """
        at = 0
        while at < len(text):
            match = matches.search(text, at, at + _WINDOW_CHARS + self._longest)
            if match is None or match.start() >= at + _WINDOW_CHARS:  # a match there may be cut off by the window
                at += _WINDOW_CHARS
            else:
                yield match
                at = match.end()


class SegmentCache:
    """An LRU cache of token ids by segment of text. It is bounded in bytes and thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._entries: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    @staticmethod
    def key(piece: str) -> bytes:
        return hashlib.blake2b(piece.encode(), digest_size=16).digest()

    def get(self, keys: Sequence[bytes]) -> list[array[int] | None]:
        found: list[array[int] | None] = []
        with self._lock:
            for key in keys:
                ids = self._entries.get(key)
                if ids is not None:
                    self._entries.move_to_end(key)
                found.append(ids)
        return found

    def put(self, key: bytes, ids: array[int]) -> None:
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = ids
            self._used_bytes += _entry_bytes(ids)
            while self._used_bytes > self._limit_bytes:
                _, oldest = self._entries.popitem(last=False)
                self._used_bytes -= _entry_bytes(oldest)


def newline_settles(spec: dict[str, Any]) -> bool:
    """Return True if this tokenizer is known to end a piece at a newline between two printable ASCII characters."""
    model = spec.get("model") or {}
    if model.get("type") != "BPE" or model.get("dropout"):
        return False
    return all(_normalizer_is_local(part) for part in _parts(spec.get("normalizer"), "normalizers")) and (
        _pre_tokenizer_settles(_parts(spec.get("pre_tokenizer"), "pretokenizers"))
    )


def _is_plain(token: AddedToken) -> bool:
    # A token that starts with a space could lose it to an `rstrip` token on its left.
    return not token.lstrip and not token.rstrip and not token.content[0].isspace()


def _lines(text: str, start: int, end: int) -> list[str]:
    # A split depends only on the text before it: a text that was extended is split at the same places.
    pieces = []
    while end - start > _LINES_CHARS and text.find("\n", start + _LINES_CHARS, end) >= 0:  # faster than the expression
        newline = _SETTLED_NEWLINE.search(text, start + _LINES_CHARS, end)
        if newline is None:
            break
        pieces.append(text[start : newline.end()])
        start = newline.end()
    pieces.append(text[start:end])
    return pieces


def _entry_bytes(ids: array[int]) -> int:
    return 200 + ids.itemsize * len(ids)  # plus the key, the array object and the dictionary entry


def _parts(step: dict[str, Any] | None, list_name: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step.get("type") == "Sequence":
        return [part for inner in step[list_name] for part in _parts(inner, list_name)]
    return [step]


def _normalizer_is_local(part: dict[str, Any]) -> bool:
    return part.get("type") == "NFC"  # NFC never composes ASCII characters next to a newline


def _pre_tokenizer_settles(parts: list[dict[str, Any]]) -> bool:
    if not parts or parts[-1].get("type") != "ByteLevel" or parts[-1].get("add_prefix_space"):
        return False
    splits = bool(parts[-1].get("use_regex", True))
    for part in parts[:-1]:
        if part.get("type") == "Split":
            expression = (part.get("pattern") or {}).get("Regex")
            if expression not in _NEWLINE_ENDS_PIECE or part.get("behavior") != "Isolated" or part.get("invert"):
                return False
            splits = splits or r"\s*[\r\n]+" in expression or r"\s+(?!\S)" in expression
        elif part.get("type") != "Digits":
            return False
    return splits

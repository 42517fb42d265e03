"""A cache for the prefix keys of prompt texts, so that only new text is tokenized and hashed.

Texts are recognised by a chained hash over chunks of 4,096 characters. For each known chunk, the cache holds the last point
before the chunk's end at which the text may be split for tokenization (`Tokenizer.split`): the prefix keys of the blocks
that are full there, and the left-over tokens. So a conversation that has grown costs the fast chunk hash of the whole text,
and tokenization of its new end.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from xxhash import xxh3_64_intdigest

from stoker.base.errors import InvalidRequest
from stoker.gateway.prefix.prefix_keys import token_keys

_CHUNK_CHARS = 4096
_LIMIT_BYTES = 128 << 20
# Some steps hold the interpreter lock for a whole piece or batch, and the event loop waits for it.
_MAX_PIECE_CHARS = 1 << 19
_BATCH_PIECES = 256


class PieceTokenizer(Protocol):
    """The part of Tokenizer that is used here."""

    @property
    def lookahead(self) -> int: ...

    def split(self, text: str) -> list[str]: ...

    def encode_pieces(self, pieces: Sequence[str]) -> list[array[int]]: ...


@dataclass(frozen=True, slots=True)
class _CutPoint:
    """A point where the text may be split: its position, the prefix keys since the previous point, left-over tokens."""

    chars: int
    num_tokens: int
    keys: list[int]
    last_key: int
    left: array[int]

    @property
    def num_bytes(self) -> int:
        return 400 + 40 * len(self.keys) + 4 * len(self.left)


class PrefixMemo:
    """The cache. Thread-safe; bounded by `limit_bytes` with LRU eviction."""

    def __init__(self, tokenizer: PieceTokenizer, block_tokens: int, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._tokenizer = tokenizer
        self._block_tokens = block_tokens
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._points: OrderedDict[int, _CutPoint] = OrderedDict()
        self._lock = threading.Lock()

    def blocks(self, text: str, root: int) -> tuple[list[int], int]:
        """Return the prefix keys of all full blocks of the text's tokens, and the number of tokens."""
        try:
            chunks = _chunk_hashes(text, root)
        except UnicodeEncodeError as broken:
            raise InvalidRequest(f"the prompt has an unpaired surrogate at character {broken.start}") from broken
        point, keys, num_known = self._known(chunks, root)
        pieces = self._tokenizer.split(text[point.chars :])
        fresh: list[tuple[int, _CutPoint]] = []
        walk = _Walk(point, self._block_tokens)
        settled = -self._tokenizer.lookahead  # a split is final only this many characters before the end of known text
        for piece, ids in self._encoded(pieces):
            after = walk.chars + len(piece)
            while num_known < len(chunks) and (num_known + 1) * _CHUNK_CHARS + settled < after:
                fresh.append((chunks[num_known], walk.point()))
                num_known += 1
            walk.add(piece, ids)
        rest = walk.point()
        self._remember(fresh)
        for _, new in fresh:
            keys += new.keys
        return keys + rest.keys, rest.num_tokens

    def _encoded(self, pieces: list[str]) -> Iterator[tuple[str, array[int]]]:
        longest = max(map(len, pieces), default=0)
        if longest > _MAX_PIECE_CHARS:
            raise InvalidRequest(f"the prompt has {longest} characters without a place to split it")
        for at in range(0, len(pieces), _BATCH_PIECES):
            batch = pieces[at : at + _BATCH_PIECES]
            yield from zip(batch, self._tokenizer.encode_pieces(batch), strict=True)

    def _known(self, chunks: list[int], root: int) -> tuple[_CutPoint, list[int], int]:
        """Return the furthest cached point of this text, all keys up to it, and the number of known chunks."""
        point, keys, number = _CutPoint(0, 0, [], root, array("I")), [], 0
        with self._lock:
            for chunk in chunks:
                found = self._points.get(chunk)
                if found is None:
                    break
                self._points.move_to_end(chunk)
                point, number = found, number + 1
                keys += found.keys
        return point, keys, number

    def _remember(self, fresh: list[tuple[int, _CutPoint]]) -> None:
        with self._lock:
            for chunk, point in fresh:
                if chunk not in self._points:
                    self._points[chunk] = point
                    self._used_bytes += point.num_bytes
            while self._used_bytes > self._limit_bytes:
                _, oldest = self._points.popitem(last=False)
                self._used_bytes -= oldest.num_bytes


class _Walk:
    """Advances from a known point, piece by piece."""

    def __init__(self, start: _CutPoint, block_tokens: int) -> None:
        self.chars = start.chars
        self._num_tokens = start.num_tokens
        self._last_key = start.last_key
        self._left = array("I", start.left)
        self._block_tokens = block_tokens

    def add(self, piece: str, ids: array[int]) -> None:
        self.chars += len(piece)
        self._num_tokens += len(ids)
        self._left.extend(ids)

    def point(self) -> _CutPoint:
        """Return the current point, with the prefix keys of the blocks completed since the previous call."""
        keys = token_keys(self._left, self._last_key, self._block_tokens)
        if keys:
            self._last_key = keys[-1]
            self._left = self._left[len(keys) * self._block_tokens :]
        return _CutPoint(self.chars, self._num_tokens, keys, self._last_key, array("I", self._left))


def _chunk_hashes(text: str, root: int) -> list[int]:
    # The root is part of every hash, so texts under different cache salts never share an entry.
    key = root
    return [
        key := xxh3_64_intdigest(text[at : at + _CHUNK_CHARS].encode(), key)
        for at in range(0, len(text) - _CHUNK_CHARS + 1, _CHUNK_CHARS)
    ]

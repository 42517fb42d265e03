"""Block keys of a prompt's text, tokenizing and hashing only what has not been seen.

Texts are recognised by a chained hash over chunks of 4,096 characters. With each chunk seen before, the memo has the keys
of the blocks that were full at the last place before the chunk's end at which the text may be cut (`Tokenizer.split`),
and the tokens left over there. So a conversation that grew costs its hash, which is quick, and the tokens of its new end.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from xxhash import xxh3_64_intdigest

from stoker.base.errors import InvalidRequest
from stoker.gateway.prefix.prefix_keys import token_keys

_CHUNK_CHARS = 4096
_LIMIT_BYTES = 128 << 20


class PieceTokenizer(Protocol):
    """What of Tokenizer is used."""

    @property
    def lookahead(self) -> int: ...

    def split(self, text: str) -> list[str]: ...

    def encode_pieces(self, pieces: Sequence[str]) -> list[array[int]]: ...


@dataclass(frozen=True, slots=True)
class _Place:
    """What is known at a place where the text may be cut: how far it is, the keys since the place before, what is left."""

    chars: int
    num_tokens: int
    keys: list[int]
    last_key: int
    left: array[int]

    @property
    def num_bytes(self) -> int:
        return 400 + 40 * len(self.keys) + 4 * len(self.left)


class PrefixMemo:
    """Safe to share between threads. `limit_bytes` bounds it; what was used least lately goes first."""

    def __init__(self, tokenizer: PieceTokenizer, block_tokens: int, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._tokenizer = tokenizer
        self._block_tokens = block_tokens
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._places: OrderedDict[int, _Place] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def blocks(self, text: str, root: int) -> tuple[list[int], int]:
        """The keys of all full blocks of the text's tokens, and how many tokens there are."""
        try:
            chunks = _chunk_hashes(text, root)
        except UnicodeEncodeError as broken:
            raise InvalidRequest(
                f"the text is not valid Unicode: character {broken.start} is half a surrogate pair"
            ) from broken
        place, keys, num_known = self._known(chunks, root)
        pieces = self._tokenizer.split(text[place.chars :])
        fresh: list[tuple[int, _Place]] = []
        walk = _Walk(place, self._block_tokens)
        settled = -self._tokenizer.lookahead  # a cut is believed only so far before the end of what was compared
        for piece, ids in zip(pieces, self._tokenizer.encode_pieces(pieces), strict=True):
            after = walk.chars + len(piece)
            while num_known < len(chunks) and (num_known + 1) * _CHUNK_CHARS + settled < after:
                fresh.append((chunks[num_known], walk.place()))
                num_known += 1
            walk.add(piece, ids)
        rest = walk.place()
        self._remember(fresh)
        for _, new in fresh:
            keys += new.keys
        return keys + rest.keys, rest.num_tokens

    def _known(self, chunks: list[int], root: int) -> tuple[_Place, list[int], int]:
        """The furthest place that this text shares with one seen before, all keys up to there, and its chunk's number."""
        place, keys, number = _Place(0, 0, [], root, array("I")), [], 0
        with self._lock:
            for chunk in chunks:
                found = self._places.get(chunk)
                if found is None:
                    break
                self._places.move_to_end(chunk)
                place, number = found, number + 1
                keys += found.keys
        return place, keys, number

    def _remember(self, fresh: list[tuple[int, _Place]]) -> None:
        with self._lock:
            for chunk, place in fresh:
                if chunk not in self._places:
                    self._places[chunk] = place
                    self._used_bytes += place.num_bytes
            while self._used_bytes > self._limit_bytes:
                _, oldest = self._places.popitem(last=False)
                self._used_bytes -= oldest.num_bytes


class _Walk:
    """From a known place on, piece by piece."""

    def __init__(self, start: _Place, block_tokens: int) -> None:
        self.chars = start.chars
        self._num_tokens = start.num_tokens
        self._last_key = start.last_key
        self._left = array("I", start.left)
        self._block_tokens = block_tokens

    def add(self, piece: str, ids: array[int]) -> None:
        self.chars += len(piece)
        self._num_tokens += len(ids)
        self._left.extend(ids)

    def place(self) -> _Place:
        """Here, with the keys of the blocks that became full since it was last asked."""
        keys = token_keys(self._left, self._last_key, self._block_tokens)
        if keys:
            self._last_key = keys[-1]
            self._left = self._left[len(keys) * self._block_tokens :]
        return _Place(self.chars, self._num_tokens, keys, self._last_key, array("I", self._left))


def _chunk_hashes(text: str, root: int) -> list[int]:
    # A salt's texts are another tenant's: the root is in the hash of the first chunk, and so in all.
    key = root
    return [
        key := xxh3_64_intdigest(text[at : at + _CHUNK_CHARS].encode(), key)
        for at in range(0, len(text) - _CHUNK_CHARS + 1, _CHUNK_CHARS)
    ]

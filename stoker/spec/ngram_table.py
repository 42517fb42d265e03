"""NgramTable: where each n-gram of a growing text occurred last.

It is a hash table of positions. A hash collision overwrites an older entry, and a lookup compares the tokens
themselves. So the table never grows beyond its limit, and a lookup is never wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SIZES = (4, 3, 2)  # the lengths of the n-grams, longest first

_MIN_BITS, _MAX_BITS = 10, 17  # of the number of entries: at most 512 KiB
_ENTRIES_PER_TOKEN = 4  # at most; with fewer, more entries would be overwritten
_WORD = (1 << 64) - 1
_FACTOR, _SPREAD = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93  # odd numbers with irregular bits
# Tokens of the text that are in the table when it is made. Older ones would mostly be overwritten by newer ones.
WINDOW = (1 << _MAX_BITS) // _ENTRIES_PER_TOKEN


class NgramTable:
    """Positions of the tokens that followed each n-gram. The caller passes the whole text with every call."""

    def __init__(self) -> None:
        self._num_added = 0  # leading tokens of the text that are in the table
        self._bits = 0
        self._last = np.zeros(0, dtype=np.int32)

    def update(self, token_ids: Sequence[int]) -> None:
        """Add the tokens after those of the last call. The time is proportional to their number."""
        if len(token_ids) <= self._num_added:
            return
        if len(token_ids) * _ENTRIES_PER_TOKEN > len(self._last) and self._bits < _MAX_BITS:
            self._build(token_ids)
            return
        for position in range(max(self._num_added, 1), len(token_ids)):
            for size in SIZES:
                if size <= position:
                    self._last[_slot(token_ids[position - size : position], self._bits)] = position
        self._num_added = len(token_ids)

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Return the position after the latest earlier occurrence of the last tokens. Longer n-grams go first."""
        for size in SIZES:
            gram = token_ids[-size:]
            if len(gram) == size:
                position = int(self._last[_slot(gram, self._bits)])
                if position and token_ids[position - size : position] == gram:
                    return position
        return None

    def _build(self, token_ids: Sequence[int]) -> None:
        """Make a larger table of the newest tokens."""
        first = max(0, len(token_ids) - WINDOW)
        wanted = (2 * (len(token_ids) - first) * _ENTRIES_PER_TOKEN - 1).bit_length()
        self._bits = min(_MAX_BITS, max(_MIN_BITS, wanted))
        self._last = np.zeros(1 << self._bits, dtype=np.int32)
        text = np.array(token_ids[first:], dtype=np.uint64)
        for size in SIZES:
            count = len(text) - size  # the last n-gram has no following token
            if count > 0:
                hashed = np.full(count, size, dtype=np.uint64)
                for i in range(size):
                    hashed *= np.uint64(_FACTOR)
                    hashed += text[i : i + count]
                slots = (hashed * np.uint64(_SPREAD)) >> np.uint64(64 - self._bits)
                # Where a slot occurs several times, the last assignment counts.
                self._last[slots] = np.arange(first + size, first + size + count, dtype=np.int32)
        self._num_added = len(token_ids)


def _slot(gram: Sequence[int], bits: int) -> int:
    hashed = len(gram)
    for token_id in gram:
        hashed = (hashed * _FACTOR + token_id) & _WORD
    return ((hashed * _SPREAD) & _WORD) >> (64 - bits)

"""TokenHistory: a text of bounded length in which earlier occurrences of a context are found quickly.

The text is a ring buffer: new tokens overwrite the oldest ones. Positions that follow the same three tokens (by their
hash) form a chain, newest first. Nothing is ever rebuilt, so adding a token takes a constant time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

CONTEXT = 3  # tokens by which occurrences are found
BORDER = -1  # between two texts; it never matches a token

_MAX_CHAIN = 32  # entries of a chain that are looked at
_WORD = (1 << 64) - 1
_FACTOR, _SPREAD = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93  # odd numbers with irregular bits


class TokenHistory:
    """The last `capacity` tokens, which is a power of two. Positions count from the first token that was ever added."""

    def __init__(self, capacity: int) -> None:
        assert capacity & (capacity - 1) == 0, f"capacity {capacity} is not a power of two"
        self._mask = capacity - 1
        self._shift = 65 - capacity.bit_length()
        self._text = array("i", bytes(4 * capacity))
        self._chain = array("q", bytes(8 * capacity))  # by position: the position before in its chain; 0: none
        self._newest = array("q", bytes(8 * capacity))  # by hash: the first position of the chain
        self._end = 0

    @property
    def num_bytes(self) -> int:
        return sum(part.itemsize * len(part) for part in (self._text, self._chain, self._newest))

    def add(self, token_ids: Iterable[int]) -> None:
        """Append tokens. BORDER starts a new text."""
        mask, text = self._mask, self._text
        for token_id in token_ids:
            end = self._end
            text[end & mask] = token_id
            # The token at `end` is what followed the tokens before it.
            slot = self._slot(text[(end - 3) & mask], text[(end - 2) & mask], text[(end - 1) & mask])
            self._chain[end & mask] = self._newest[slot]
            self._newest[slot] = end
            self._end = end + 1

    def occurrences(self, context: Sequence[int]) -> Iterator[int]:
        """Yield the positions that follow an occurrence of the last three tokens of `context`, newest first."""
        mask, text = self._mask, self._text
        a, b, c = context[-CONTEXT:]
        oldest = max(CONTEXT, self._end - self._mask + CONTEXT)  # a token before it may be overwritten
        position = self._newest[self._slot(a, b, c)]
        for _ in range(_MAX_CHAIN):
            if position < oldest:
                return
            if (
                text[(position - 1) & mask] == c
                and text[(position - 2) & mask] == b
                and text[(position - 3) & mask] == a
            ):
                yield position
            position = self._chain[position & mask]

    def match_length(self, position: int, context: Sequence[int], limit: int) -> int:
        """Return how many of the last tokens of `context` stand before an occurrence's position, at most `limit`."""
        text, mask = self._text, self._mask
        limit = min(limit, len(context), position, mask - (self._end - position))
        for i in range(CONTEXT + 1, limit + 1):
            if text[(position - i) & mask] != context[-i]:
                return i - 1
        return limit

    def text_from(self, position: int, max_tokens: int) -> list[int]:
        """Return the tokens from a position on, at most `max_tokens` and up to the end of their text."""
        first = position & self._mask
        text = self._text[first : first + min(max_tokens, self._end - position)].tolist()
        missing = min(max_tokens, self._end - position) - len(text)
        if missing > 0:  # they continue at the start of the ring buffer
            text += self._text[:missing].tolist()
        return text[: text.index(BORDER)] if BORDER in text else text

    def _slot(self, a: int, b: int, c: int) -> int:
        hashed = ((a * _FACTOR + b) * _FACTOR + c) & _WORD
        return ((hashed * _SPREAD) & _WORD) >> self._shift

"""KvReach: which earlier tokens a token sees, and so which blocks of a sequence must be kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvReach:
    """The tokens that a token sees.

    With extent 0, these are all tokens before it. With the kind "window" they are the last `extent` tokens, itself included.
    With the kind "chunk" they are those of its chunk, which is position // extent.
    """

    kind: str = "all"
    extent: int = 0

    @property
    def is_bounded(self) -> bool:
        return self.extent > 0

    @property
    def name(self) -> str:
        """The name of a bounded reach in error messages and fingerprints. Empty for an unbounded one."""
        return f"{self.kind}{self.extent}" if self.extent else ""

    def first_visible(self, position: int) -> int:
        """Return the position of the first token that the token at `position` sees. It never decreases."""
        if not self.extent:
            return 0
        if self.kind == "chunk":
            return position - position % self.extent
        return max(0, position - self.extent + 1)

    def first_block(self, position: int, block_tokens: int) -> int:
        """Return the number of the first block that the token at `position` sees."""
        return self.first_visible(position) // block_tokens

    def num_blocks(self, block_tokens: int) -> int:
        """Return the most blocks that a sequence holds while it computes one token at a time, with a bounded reach."""
        return -(-self.extent // block_tokens) + 1

    def min_pool_blocks(self, block_tokens: int) -> int:
        """Return the fewest blocks of a pool in which any sequence can run: what one sequence sees before a load, and
        what the load brings."""
        return 2 * self.num_blocks(block_tokens) if self.extent else 1


EVERYTHING = KvReach()


def visible_prefix(count: int, block_tokens: int, sets: Sequence[tuple[KvReach, Callable[[int], bool]]]) -> int:
    """Return the longest prefix of at most `count` blocks whose next token finds all that it sees.

    `sets` are reaches with a function that says whether a block of this number is there.
    """
    while True:
        for reach, is_there in sets:
            first = reach.first_block(count * block_tokens, block_tokens)
            missing = next((i for i in reversed(range(first, count)) if not is_there(i)), None)
            if missing is not None:  # all prefixes between the two need it too
                count = missing
                break
        else:
            return count

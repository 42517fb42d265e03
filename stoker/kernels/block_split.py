"""BlockSplit: which tokens of each KV block a rank holds, if the ranks of a stage split the context.

A block of the scheduler has `of` pages of equal size. Page i of a sequence, counted over all of its blocks, is on rank
i mod `of`. So every rank holds a part of every block, under the block's number.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

NOT_HELD = -1  # the slot of a token that another rank holds


@dataclass(frozen=True, slots=True)
class BlockSplit:
    """Part `index` of `of` equal parts of each block. The default is all of it."""

    index: int = 0
    of: int = 1

    def page_tokens(self, block_tokens: int) -> int:
        """Return how many tokens of a block a rank holds."""
        return block_tokens // self.of

    def slots(self, slots: Tensor, block_tokens: int) -> Tensor:
        """Return the slots of tokens in this rank's pages, given those in whole blocks."""
        if self.of == 1:
            return slots
        page_tokens = self.page_tokens(block_tokens)
        within = slots % block_tokens
        held = slots // block_tokens * page_tokens + within % page_tokens
        return held.where(within // page_tokens == self.index, NOT_HELD)


ALL_TOKENS = BlockSplit()

"""The prefix cache as drafter: what followed the same tokens before.

The block pool knows the tokens of its blocks, and the tiers report those of theirs. A block that follows the sequence's
last full block, and that begins with the tokens after it, holds what an earlier sequence continued with. The keys of
the blocks are a chain that starts with the tenant's salt, so a sequence never reaches another tenant's blocks.
"""

from __future__ import annotations

from itertools import islice

from stoker.base.ids import BlockKey
from stoker.kv.blocks.pool import BlockPool
from stoker.sched.sequence import Sequence
from stoker.spec.drafter import DRAFTERS, DrafterParts
from stoker.spec.stored_blocks import StoredBlocks

# At most this many blocks that follow the same block are compared. A system prompt that precedes every chat has
# thousands of them.
_MAX_CHILDREN = 16


@DRAFTERS.register("cache")
class CacheDrafter:
    """Follows the newest chain of blocks that agrees with the sequence. It keeps no state."""

    def __init__(self, parts: DrafterParts) -> None:
        parts.refuse_argument("cache")
        self._sources: tuple[BlockPool | StoredBlocks, ...] = (parts.pool, parts.stored)  # in this order

    def propose(self, seq: Sequence, max_tokens: int) -> list[int]:
        seq.extend_keys()
        num_full = len(seq.keys)
        parent = seq.parent_of(num_full)
        tail = tuple(seq.token_ids[num_full * seq.block_tokens :])
        guesses: list[int] = []
        while len(guesses) < max_tokens and (child := self._child(parent, tail)) is not None:
            parent, token_ids = child
            guesses += token_ids[len(tail) :]
            tail = ()
        return guesses[:max_tokens]

    def ended(self, seq: Sequence) -> None:
        pass

    def _child(self, parent: BlockKey, tail: tuple[int, ...]) -> tuple[BlockKey, tuple[int, ...]] | None:
        """Return the key and the tokens of the newest block after `parent` that begins with `tail`."""
        for source in self._sources:
            for key, token_ids in islice(source.children(parent), _MAX_CHILDREN):
                if token_ids[: len(tail)] == tail:
                    return key, token_ids
        return None

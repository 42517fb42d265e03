"""StoredBlocks: the tokens of blocks that the tiers have reported, found by the block before them.

The device's pool forgets a block when it is reused. A tier may hold the block for hours longer, and reports its name
with its tokens. Keys are chains that start with the tenant's salt, so one tenant never finds another's blocks.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from stoker.base.ids import BlockKey
from stoker.kv.blocks.transfer import BlockName

DEFAULT_BLOCKS = 1 << 16  # about 400 bytes each, with blocks of 16 tokens


class StoredBlocks:
    """The last `limit` blocks that any tier has taken. A limit of 0 turns it off."""

    def __init__(self, limit: int = DEFAULT_BLOCKS) -> None:
        self._limit = limit
        self._tokens: OrderedDict[BlockKey, tuple[BlockKey, array[int]]] = (
            OrderedDict()
        )  # with the parent, oldest first
        self._children: dict[BlockKey, dict[BlockKey, None]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def update(self, stored: Iterable[BlockName], removed: Iterable[BlockKey]) -> None:
        """Take in an event of a tier."""
        if not self._limit:
            return
        for name in stored:
            self._remove(name.key)
            self._tokens[name.key] = (name.parent, array("I", name.token_ids))
            self._children.setdefault(name.parent, {})[name.key] = None
            if len(self._tokens) > self._limit:
                self._remove(next(iter(self._tokens)))
        for key in removed:
            self._remove(key)

    def children(self, parent: BlockKey) -> Iterator[tuple[BlockKey, tuple[int, ...]]]:
        """Yield the keys and the tokens of the blocks that follow `parent`, newest first."""
        for key in reversed(self._children.get(parent, {})):
            yield key, tuple(self._tokens[key][1])

    def _remove(self, key: BlockKey) -> None:
        found = self._tokens.pop(key, None)
        if found is None:
            return
        siblings = self._children[found[0]]
        del siblings[key]
        if not siblings:
            del self._children[found[0]]

"""FreeBlocks: blocks that no sequence holds, in the order in which they are reused.

Blocks without a name are reused first. Named blocks follow in the order of their last use, but a block that a later request
has found counts as used 20 seconds later than it was: a prefix that was found once is found again about twice as often as a
new one. The bonus is a fixed time and not a factor, so it matters less the longer the last use is ago. With small caches,
recorded agent sessions get a fifth more cache hits from it, and chats slightly more (bench/RESULTS.md).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from stoker.base.ids import BlockId

FOUND_AGAIN_S = 20.0


class FreeBlocks:
    """The caller passes the time, which must never decrease."""

    def __init__(self, blocks: Iterable[BlockId]) -> None:
        self._unnamed: dict[BlockId, None] = dict.fromkeys(blocks)
        # When each block was last used or counts as used. Both dictionaries are sorted by that time.
        self._used_once: OrderedDict[BlockId, float] = OrderedDict()
        self._found_again: OrderedDict[BlockId, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._unnamed) + len(self._used_once) + len(self._found_again)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._unnamed or block in self._used_once or block in self._found_again

    def add_unnamed(self, block: BlockId) -> None:
        self._unnamed[block] = None

    def add_named(self, block: BlockId, now_s: float, *, was_found: bool) -> None:
        """Add a named block. `was_found`: a later sequence than the one that computed it has used it."""
        if was_found:
            self._found_again[block] = now_s + FOUND_AGAIN_S
        else:
            self._used_once[block] = now_s

    def remove(self, block: BlockId) -> None:
        for part in (self._found_again, self._used_once, self._unnamed):
            if block in part:
                del part[block]
                return
        raise KeyError(block)

    def pop(self) -> BlockId:
        """Remove and return the block to reuse next."""
        if self._unnamed:
            return self._unnamed.popitem()[0]
        once, again = (next(iter(part.items()), None) for part in (self._used_once, self._found_again))
        is_once = again is None or (once is not None and once[1] <= again[1])
        return (self._used_once if is_once else self._found_again).popitem(last=False)[0]

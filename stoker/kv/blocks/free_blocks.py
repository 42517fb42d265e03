"""FreeBlocks: blocks that no sequence holds, in the order in which they are reused.

Blocks without a name are reused first, then those that a running sequence has passed: it goes on without them, and a
later request most often continues at the end of an earlier one. Other named blocks follow in the order of their last
use, but a block that the prefix of a later request has matched counts as used 20 seconds later than it was: it is
matched again about twice as often as a new block. The bonus is a fixed time and not a factor, so it matters less the
longer ago the last use was. With small caches, recorded agent sessions get a fifth more cache hits from it, and chats
slightly more (bench/RESULTS.md).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from stoker.base.ids import BlockId

MATCHED_BONUS_S = 20.0


class FreeBlocks:
    """The caller passes the time, which must never decrease."""

    def __init__(self, num_blocks: int) -> None:
        """The blocks from 0 to before `num_blocks` are free, and no sequence has held them yet."""
        self._num_blocks = num_blocks
        # The blocks from here on were never taken. They are in no dictionary: most of a large pool is empty for a long time.
        self._first_new = 0
        self._unnamed: dict[BlockId, None] = {}
        self._passed: dict[BlockId, None] = {}  # the first was passed longest ago
        # When each block was last used or counts as used. Both dictionaries are sorted by that time.
        self._used_once: OrderedDict[BlockId, float] = OrderedDict()
        self._matched: OrderedDict[BlockId, float] = OrderedDict()

    def __len__(self) -> int:
        num_used = len(self._unnamed) + len(self._passed) + len(self._used_once) + len(self._matched)
        return self._num_blocks - self._first_new + num_used

    def __contains__(self, block: BlockId) -> bool:
        is_new = self._first_new <= block < self._num_blocks
        return is_new or any(block in part for part in (self._unnamed, self._passed, self._used_once, self._matched))

    def add_unnamed(self, block: BlockId) -> None:
        self._unnamed[block] = None

    def add_passed(self, block: BlockId) -> None:
        """Add a named block that the sequence that held it no longer needs, while it runs on."""
        self._passed[block] = None

    def add_named(self, blocks: Iterable[BlockId], now_s: float, *, was_matched: bool) -> None:
        """Add named blocks, the first to be reused first. `was_matched`: the prefix of a later request has matched them."""
        if was_matched:
            self._matched.update(dict.fromkeys(blocks, now_s + MATCHED_BONUS_S))
        else:
            self._used_once.update(dict.fromkeys(blocks, now_s))

    def remove(self, block: BlockId) -> None:
        if block in self._matched:
            del self._matched[block]
        elif block in self._used_once:
            del self._used_once[block]
        elif block in self._unnamed:
            del self._unnamed[block]
        else:
            del self._passed[block]

    def pop(self) -> BlockId:
        """Remove and return the block to reuse next."""
        if self._unnamed:
            return self._unnamed.popitem()[0]
        if self._first_new < self._num_blocks:
            self._first_new += 1
            return BlockId(self._first_new - 1)
        if self._passed:
            block = next(iter(self._passed))
            del self._passed[block]
            return block
        once, matched = (next(iter(part.items()), None) for part in (self._used_once, self._matched))
        is_once = matched is None or (once is not None and once[1] <= matched[1])
        return (self._used_once if is_once else self._matched).popitem(last=False)[0]

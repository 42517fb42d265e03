"""FreeBlocks: blocks without an owner, in the order in which they go.

Those without a name go first, then the named ones by last use. But a block that a later request has found counts as used some
seconds later than it was: who came back once comes back twice as often as somebody new. It is a time, not a factor: the longer ago
the last use, the less that matters. Where caches are small, recorded sessions of agents find a fifth more by it, and chats a
little (bench/RESULTS.md).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from stoker.base.ids import BlockId

FOUND_AGAIN_S = 20.0


class FreeBlocks:
    def __init__(self, blocks: Iterable[BlockId], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._nameless: dict[BlockId, None] = dict.fromkeys(blocks)
        # By block: when it was used, or counts as used. In this order, each.
        self._once: OrderedDict[BlockId, float] = OrderedDict()
        self._again: OrderedDict[BlockId, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nameless) + len(self._once) + len(self._again)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._nameless or block in self._once or block in self._again

    def add_nameless(self, block: BlockId) -> None:
        self._nameless[block] = None

    def add(self, block: BlockId, *, was_found: bool) -> None:
        """One with a name. `was_found`: a sequence that came after the one that made it went on from it."""
        if was_found:
            self._again[block] = self._clock() + FOUND_AGAIN_S
        else:
            self._once[block] = self._clock()

    def remove(self, block: BlockId) -> None:
        for part in (self._again, self._once, self._nameless):
            if block in part:
                del part[block]
                return
        raise KeyError(block)

    def pop(self) -> BlockId:
        """The one that goes next."""
        if self._nameless:
            return self._nameless.popitem()[0]
        once, again = (next(iter(part.items()), None) for part in (self._once, self._again))
        is_once = again is None or (once is not None and once[1] <= again[1])
        return (self._once if is_once else self._again).popitem(last=False)[0]

"""KnownSlots: what this process knows about the slots of the host tier's table, so that it notices blocks that other
processes removed.

All methods are called under the tier's lock.
"""

from __future__ import annotations

import numpy as np

from stoker.base.ids import BlockKey
from stoker.kv.store.tiers.host.host_table import READY, HostTable


class KnownSlots:
    """The last known generation and key of each slot."""

    def __init__(self, num_slots: int) -> None:
        # 0: the slot was empty. The generation of a slot with a block is at least 1.
        self._generations = np.zeros(num_slots, dtype=np.uint64)
        self._keys = np.zeros((num_slots, 2), dtype=np.uint64)

    def note(self, table: HostTable, slot: int) -> None:
        """Record a slot that this process has filled, so that its removal is noticed even before the next `lost`."""
        self._generations[slot] = table.generations[slot]
        self._keys[slot] = table.keys[slot]

    def forget(self, slot: int) -> None:
        """Record a slot that this process has emptied."""
        self._generations[slot] = 0

    def lost(self, table: HostTable, slots: slice) -> list[BlockKey]:
        """Return the blocks that were in these slots at the last call, or were noted since, and that are in no slot of
        the table any more."""
        now = np.where(table.states[slots] == READY, table.generations[slots], np.uint64(0))
        changed = np.flatnonzero(now != self._generations[slots])
        now, changed = now[changed], changed + slots.start
        keys = self._keys[changed[self._generations[changed] != 0]]
        self._generations[changed] = now
        self._keys[changed] = table.keys[changed]
        return [BlockKey(key.tobytes()) for key in keys[~table.ready(keys)]]

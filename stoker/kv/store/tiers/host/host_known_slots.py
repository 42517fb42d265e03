"""KnownSlots: what one process knows to lie in the host tier's table, so that it notices what other processes removed.

All is done under the tier's lock. It holds no bytes and tells nobody: it compares.
"""

from __future__ import annotations

import numpy as np

from stoker.base.ids import BlockKey
from stoker.kv.store.tiers.host.host_table import READY, HostTable


class KnownSlots:
    def __init__(self, num_slots: int) -> None:
        # 0: there was nothing. The generation of a slot with a block in it is at least 1.
        self._generations = np.zeros(num_slots, dtype=np.uint64)
        self._keys = np.zeros((num_slots, 2), dtype=np.uint64)

    def note(self, table: HostTable, slot: int) -> None:
        """We filled it: should it go before the next look, it has been here."""
        self._generations[slot] = table.generations[slot]
        self._keys[slot] = table.keys[slot]

    def forget(self, slot: int) -> None:
        """We emptied it."""
        self._generations[slot] = 0

    def lost(self, table: HostTable, slots: slice) -> list[BlockKey]:
        """The blocks that were in these slots at the last look, or came since then, and are here no more, in whatever slot."""
        now = np.where(table.states[slots] == READY, table.generations[slots], np.uint64(0))
        changed = np.flatnonzero(now != self._generations[slots])
        now, changed = now[changed], changed + slots.start
        keys = self._keys[changed[self._generations[changed] != 0]]
        self._generations[changed] = now
        self._keys[changed] = table.keys[changed]
        return [BlockKey(key.tobytes()) for key in keys[~table.ready(keys)]]

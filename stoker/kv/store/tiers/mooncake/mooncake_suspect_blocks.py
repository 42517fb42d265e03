"""SuspectBlocks: blocks that Mooncake's master lists but that could not be read, because their owner is probably dead.

The master keeps listing the blocks of a dead worker for about ten seconds, and each failing read costs about a second.
So a block that failed once is not read again within that time, and neither are other blocks that only the same owner
has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from stoker.base.ids import BlockKey
from stoker.kv.store.tiers.mooncake.mooncake_client import MooncakeClient, RawClient
from stoker.kv.store.tiers.mooncake.mooncake_object import ObjectFormat

_SUSPECT_S = 12.0  # how long the master lists the blocks of a dead worker
_LOOKUP_S = 0.1


class SuspectBlocks:
    """Suspect keys and suspect owners, each until a time."""

    def __init__(self, format: ObjectFormat) -> None:
        self._format = format
        self._lock = threading.Lock()
        self._keys: dict[BlockKey, float] = {}  # the key is suspect until this time
        # keys whose owner was not looked up yet; that is done when it is needed
        self._owner_unknown: set[BlockKey] = set()
        self._owners: dict[str, float] = {}

    def add(self, keys: Sequence[BlockKey]) -> None:
        until_s = time.monotonic() + _SUSPECT_S
        with self._lock:
            self._keys.update(dict.fromkeys(keys, until_s))
            self._owner_unknown.update(keys)

    def remove(self, key: BlockKey) -> None:
        """The block was written again, or read."""
        with self._lock:
            self._keys.pop(key, None)
            self._owner_unknown.discard(key)

    def find(self, client: MooncakeClient, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """Return the blocks that should not be read now."""
        if not self._keys and not self._owners:
            return frozenset()
        now = time.monotonic()
        with self._lock:
            self._keys = {key: until_s for key, until_s in self._keys.items() if until_s > now}
            self._owner_unknown &= self._keys.keys()  # by now another worker may have it
            self._owners = {owner: until_s for owner, until_s in self._owners.items() if until_s > now}
            suspect, unknown = frozenset(self._keys), frozenset(self._owner_unknown)
        if not unknown and not self._owners:
            return suspect
        owners = self._owners_of(client, [*keys, *unknown])
        with self._lock:
            for key in unknown & owners.keys():
                self._owners.update(dict.fromkeys(owners[key], now + _SUSPECT_S))
            self._owner_unknown -= unknown
            dead = frozenset(self._owners)
        return suspect | {key for key, theirs in owners.items() if dead.issuperset(theirs)}

    def _owners_of(self, client: MooncakeClient, keys: Sequence[BlockKey]) -> dict[BlockKey, list[str]]:
        """Return the owners of each block that lies only in RAM."""
        by_store_key = {self._format.store_key(key): key for key in keys}

        def list_owners(raw: RawClient) -> dict[BlockKey, list[str]]:
            listed = raw.batch_get_replica_desc(list(by_store_key))
            return {
                by_store_key[store_key]: [
                    replica.get_memory_descriptor().buffer_descriptor.transport_endpoint for replica in replicas
                ]
                for store_key, replicas in listed.items()
                # A block that is also on an SSD can be read from there.
                if replicas and all(replica.is_memory_replica() for replica in replicas)
            }

        return client.wait(client.submit("find", list_owners), _LOOKUP_S)

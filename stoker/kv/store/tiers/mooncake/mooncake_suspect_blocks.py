"""SuspectBlocks: blocks that Mooncake's master lists, and that could not be read: their owner seems dead.

The master lists a dead worker's blocks for about ten seconds more, and each of them costs a second or so to try. So what
failed once is not tried again until then, nor is anything else that lies with the same owner alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from stoker.base.ids import BlockKey
from stoker.kv.store.tiers.mooncake.mooncake_client import MooncakeClient, RawClient
from stoker.kv.store.tiers.mooncake.mooncake_object import ObjectFormat

_DOUBT_S = 12.0  # so long the master lists what a dead worker had
_ASK_S = 0.1


class SuspectBlocks:
    def __init__(self, format: ObjectFormat) -> None:
        self._format = format
        self._lock = threading.Lock()
        self._keys: dict[BlockKey, float] = {}  # until when
        self._owner_unknown: set[BlockKey] = set()  # of those keys; the master is asked when it is needed
        self._owners: dict[str, float] = {}

    def add(self, keys: Sequence[BlockKey]) -> None:
        until_s = time.monotonic() + _DOUBT_S
        with self._lock:
            self._keys.update(dict.fromkeys(keys, until_s))
            self._owner_unknown.update(keys)

    def remove(self, key: BlockKey) -> None:
        """It was written anew, or read."""
        with self._lock:
            self._keys.pop(key, None)
            self._owner_unknown.discard(key)

    def of(self, link: MooncakeClient, keys: Sequence[BlockKey]) -> frozenset[BlockKey]:
        """Those that had better not be tried."""
        if not self._keys and not self._owners:
            return frozenset()
        now = time.monotonic()
        with self._lock:
            self._keys = {key: until_s for key, until_s in self._keys.items() if until_s > now}
            self._owner_unknown &= self._keys.keys()  # by now another may have it
            self._owners = {owner: until_s for owner, until_s in self._owners.items() if until_s > now}
            doubtful, asked = frozenset(self._keys), frozenset(self._owner_unknown)
        if not asked and not self._owners:
            return doubtful
        owners = self._ask(link, [*keys, *asked])
        with self._lock:
            for key in asked & owners.keys():
                self._owners.update(dict.fromkeys(owners[key], now + _DOUBT_S))
            self._owner_unknown -= asked
            dead = frozenset(self._owners)
        return doubtful | {key for key, theirs in owners.items() if dead.issuperset(theirs)}

    def _ask(self, link: MooncakeClient, keys: Sequence[BlockKey]) -> dict[BlockKey, list[str]]:
        """Where each lies in RAM."""
        by_store_key = {self._format.store_key(key): key for key in keys}

        def ask(client: RawClient) -> dict[BlockKey, list[str]]:
            listed = client.batch_get_replica_desc(list(by_store_key))
            return {
                by_store_key[store_key]: [
                    replica.get_memory_descriptor().buffer_descriptor.transport_endpoint for replica in replicas
                ]
                for store_key, replicas in listed.items()
                # What lies on an SSD too has another way to be read.
                if replicas and all(replica.is_memory_replica() for replica in replicas)
            }

        return link.wait(link.submit("find", ask), _ASK_S)

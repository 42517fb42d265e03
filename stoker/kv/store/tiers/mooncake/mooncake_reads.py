"""Reads objects of the Mooncake store: by the Transfer Engine from another worker's memory, otherwise by the client.

The client's own reads busy-wait (kv/mooncake/transfer_engine.py) and report nothing before the last object has arrived.
So the client only looks up where the objects are, and the Transfer Engine reads them. Each object is checksummed as soon
as it has arrived, while it is still in the CPU cache and the next ones are on their way. The client itself reads three
kinds of objects: those in this process's own segment (a copy is faster than a socket), those on an SSD, and those whose
location it did not find.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from stoker.kv.device.checksum import checksum
from stoker.kv.mooncake.transfer_engine import REQUEST_BYTES, RemoteRanges, read_in_order
from stoker.kv.store.tiers.mooncake.mooncake_client import TRANSFER_FAILED
from stoker.kv.store.tiers.mooncake.mooncake_object_buffers import ObjectBuffers


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The result of reading several objects."""

    codes: list[int]  # the object's size, or an error code of the client
    checksums: dict[int, int]  # checksums of the blocks that arrived, by index


def fetch(client: Any, engine: Any, store_keys: Sequence[str], objects: ObjectBuffers) -> FetchResult:
    """Read objects into their buffers."""
    object_bytes = sum(objects.sizes[0])
    found = client.batch_get_replica_desc(list(store_keys))
    here = client.get_hostname()
    remote = {
        i: _runs(replica, objects, i)
        for i, key in enumerate(store_keys)
        if (replica := _remote(found.get(key, ()), object_bytes, here)) is not None
    }
    codes, checksums = [TRANSFER_FAILED] * len(store_keys), {}
    if others := [i for i in range(len(store_keys)) if i not in remote]:
        replies = client.batch_get_into_multi_buffers(
            [store_keys[i] for i in others], [objects.places[i] for i in others], [objects.sizes[i] for i in others]
        )
        for i, code in zip(others, replies, strict=True):
            codes[i] = code
            if code == object_bytes:
                checksums[i] = checksum(objects.buffers[i])
    with closing(read_in_order(engine, chain.from_iterable(remote.values()))) as reads:
        for i, runs in remote.items():
            if all(list(islice(reads, len(runs)))):
                codes[i], checksums[i] = object_bytes, checksum(objects.buffers[i])
    return FetchResult(codes, checksums)


def _remote(replicas: Sequence[Any], object_bytes: int, here: str) -> Any | None:
    """Return where the object is complete in another worker's memory. None if it is also in ours, or in no memory."""
    in_memory = [
        replica.get_memory_descriptor().buffer_descriptor for replica in replicas if replica.is_memory_replica()
    ]
    if any(place.transport_endpoint == here for place in in_memory):
        return None
    return next((place for place in in_memory if place.size == object_bytes), None)


def _runs(place: Any, objects: ObjectBuffers, i: int) -> list[RemoteRanges]:
    """Split the read of one object into requests of at most about REQUEST_BYTES."""
    runs, theirs = [], place.buffer_address
    for ours, size in zip(objects.places[i], objects.sizes[i], strict=True):
        piece = -(-size // max(1, size // REQUEST_BYTES))
        runs += [
            RemoteRanges(place.transport_endpoint, [ours + start], [theirs + start], [min(piece, size - start)])
            for start in range(0, size, piece)
        ]
        theirs += size
    return runs

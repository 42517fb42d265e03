"""The Mooncake tier: blocks in the RAM and on the SSDs of all workers of a cluster, found through one master.

Bytes go directly between the store and the caller's buffers. A call that hangs keeps its buffers alive until it ends,
and its caller must not use them again. Blocks are checksummed as they arrive. mooncake_client.py describes what happens
when parts of the store fail. For this tier it means a miss, or a block that is declined.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import ClassVar, TypeVar

import numpy as np

from stoker.base.config import StoreSettings
from stoker.base.ids import BlockKey
from stoker.base.log import EventLog
from stoker.kv.blocks.transfer import BlockName, TierUnavailable
from stoker.kv.store.tiers.mooncake.mooncake_client import (
    NO_SPACE,
    NOT_FOUND,
    TRANSFER_FAILED,
    WRONG_SIZE,
    MooncakeClient,
    RawClient,
)
from stoker.kv.store.tiers.mooncake.mooncake_known_blocks import KnownBlocks
from stoker.kv.store.tiers.mooncake.mooncake_object import ObjectFormat, ObjectHeader
from stoker.kv.store.tiers.mooncake.mooncake_object_buffers import ObjectBuffers
from stoker.kv.store.tiers.mooncake.mooncake_reads import FetchResult, fetch
from stoker.kv.store.tiers.mooncake.mooncake_suspect_blocks import SuspectBlocks
from stoker.kv.store.tiers.tier import HostBytes, Tier, TierContext, TierStats, register_tier

_BATCH_BYTES = 64 << 20  # most bytes of one call; each call has an overhead of a millisecond
_BATCH_BLOCKS = 256
_FIND_S = 0.1
_CALL_S = 0.5
_SLOWEST_BYTES_PER_S = 50e6  # a call may take _CALL_S plus its bytes at this rate
_FULL_WAITS_S = (0.01, 0.03, 0.05)  # waits after a put into a full store; the master evicts in the background
_WRITE_PAUSE_S = 1.0  # no puts for this long after one failed
_AUDIT_PERIOD_S = 5.0
_AUDIT_BLOCKS = 16
_LOOKUP_BLOCKS = 1024
_SSD_GRACE_S = 6.0  # blocks on SSDs are listed again after this time without our help

log = EventLog("kv.mooncake")
T = TypeVar("T")


@register_tier("mooncake", distance=300)
def mooncake_tier(settings: StoreSettings, context: TierContext) -> Tier | None:
    if settings.mooncake_master is None:
        return None
    segment_gib = context.share * settings.mooncake_segment_gib
    return MooncakeTier(replace(settings, mooncake_segment_gib=segment_gib), context)


class MooncakeTier:
    """A tier in a Mooncake store. See the contract in tier.py."""

    medium: ClassVar[str] = "MOONCAKE"

    def __init__(self, settings: StoreSettings, context: TierContext) -> None:
        self._format = ObjectFormat(context.fingerprint, context.layout)
        self.shared_location = settings.mooncake_master
        self._on_forgotten = context.on_forgotten
        self._segment_bytes = int(settings.mooncake_segment_gib * 2**30)
        self._has_ssd = settings.mooncake_ssd_dir is not None
        self._batch_blocks = max(1, min(_BATCH_BLOCKS, _BATCH_BYTES // self._format.block_bytes))
        self._headroom_bytes = context.headroom_bytes
        self._is_tcp = settings.mooncake_protocol == "tcp"
        # By address. The buffers are kept alive, so that a registered address is never reused for other memory.
        self._registered: dict[int, HostBytes] = {}
        self._call_s = _CALL_S + self._batch_blocks * self._format.object_bytes / _SLOWEST_BYTES_PER_S
        self._known = KnownBlocks(self._format, context.on_evicted)
        self._suspects = SuspectBlocks(self._format)
        self._write_pause_until_s = 0.0
        self._audit_s = 0.0
        self._corrupt = self._errors = 0
        self._store_client = MooncakeClient(settings, self)

    # ---- the contract of a tier

    def find(self, keys: Sequence[BlockKey]) -> list[bool]:
        if not keys:
            return []
        try:
            found = self._listed(self._list(keys), _FIND_S)
            suspect = self._suspects.find(self._store_client, keys)
        except TierUnavailable:
            return [False] * len(keys)
        self._known.forget([key for key, is_there in zip(keys, found, strict=True) if is_there == 0])
        return [is_there == 1 and key not in suspect for key, is_there in zip(keys, found, strict=True)]

    def read(self, keys: Sequence[BlockKey], into: Sequence[HostBytes]) -> list[bool]:
        self._store_client.check()
        right = [False] * len(keys)
        suspect = self._suspects.find(self._store_client, keys)
        # The client answers only once for a key that appears twice in a batch.
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        wanted = [i for key, i in sorted(first.items(), key=lambda item: item[1]) if key not in suspect]
        try:
            for indices in _batches(wanted, self._batch_blocks):
                self._read(indices, keys, into, right)
        except TierUnavailable:
            self._errors += 1
            raise
        for i, key in enumerate(keys):
            if first[key] != i and right[first[key]]:
                np.copyto(into[i], into[first[key]])
                right[i] = True
        return right

    def write(self, names: Sequence[BlockName], data: Sequence[HostBytes], checksums: Sequence[int]) -> list[bool]:
        taken = [False] * len(names)
        if not names or time.monotonic() < self._write_pause_until_s:
            return taken
        try:
            listed = self._list([name.key for name in names])
            missing = self._missing(names, self._listed(listed, self._call_s), taken)
            first = {names[i].key: i for i in reversed(missing)}
            for indices in _batches(sorted(first.values()), self._batch_blocks):
                if time.monotonic() < self._write_pause_until_s:
                    break
                self._write(indices, names, data, checksums, taken)
            for i in missing:
                taken[i] = taken[first[names[i].key]]
        except TierUnavailable:
            self._errors += 1
            self._write_pause_until_s = time.monotonic() + _WRITE_PAUSE_S
        return taken

    def drop(self, keys: Sequence[BlockKey]) -> None:
        self._known.drop(keys)
        try:
            self._store_client.wait(self._remove(keys), self._call_s)
        except TierUnavailable:
            self._errors += 1

    def catch_up(self) -> None:
        """Nothing to do: `tick` finds removed blocks on the client's thread."""

    def names(self) -> Iterator[BlockName]:
        """Return what this worker has written or read. Other workers announce their own blocks."""
        return self._known.names()

    def stats(self) -> TierStats:
        return TierStats(
            blocks=len(self._known),
            used_bytes=len(self._known) * self._format.object_bytes,
            capacity_bytes=self._segment_bytes,
            evicted=self._known.num_evicted,
            corrupt=self._corrupt,
            errors=self._errors,
        )

    def close(self) -> None:
        self._store_client.close()

    # ---- on the client's maintenance thread

    def forgotten(self, client: RawClient) -> None:
        """Report the blocks that the restarted master does not list any more, so that they are written again."""
        if self._has_ssd:
            time.sleep(_SSD_GRACE_S)
        # A read that failed with the master, or a look-up after its restart, has made callers forget blocks already.
        keys = [*self._known.oldest(), *self._known.recently_forgotten()]
        lost = self._lost_of(client, keys)
        log.event("mooncake_forgot", known=len(keys), lost=len(lost))
        if lost:
            self._known.forget(lost)
            self._on_forgotten(lost)

    def tick(self, client: RawClient) -> None:
        """Find blocks that the store has evicted. The store does not report evictions. The blocks that were known
        longest go first, so a check of a few is enough. A check makes them look recently used to the master, so it is
        done rarely."""
        self._known.start_period()
        now = time.monotonic()
        if now - self._audit_s < _AUDIT_PERIOD_S:
            return
        self._audit_s = now
        count = _AUDIT_BLOCKS
        while True:
            oldest = self._known.oldest(count)
            lost = self._lost_of(client, oldest)
            self._known.forget(lost)
            self._known.renew(oldest)
            if not lost:
                return
            count = _LOOKUP_BLOCKS

    def _lost_of(self, client: RawClient, keys: Sequence[BlockKey]) -> list[BlockKey]:
        lost: list[BlockKey] = []
        for batch in _batches(keys, _LOOKUP_BLOCKS):
            found = client.batch_is_exist([self._format.store_key(key) for key in batch])
            lost += [key for key, is_there in zip(batch, found, strict=True) if is_there == 0]
        return lost

    # ---- reading

    def _list(self, keys: Sequence[BlockKey]) -> Future[list[int]]:
        """Ask the master which of these blocks (at least one) it lists."""
        store_keys = [self._format.store_key(key) for key in keys]
        return self._store_client.submit("find", lambda client: list(client.batch_is_exist(store_keys)))

    def _listed(self, listed: Future[list[int]], deadline_s: float) -> list[int]:
        """Wait for the master's reply."""
        found = self._store_client.wait(listed, deadline_s)
        self._store_client.check_codes(found)
        return found

    def _read(
        self,
        indices: list[int],
        keys: Sequence[BlockKey],
        into: Sequence[HostBytes],
        right: list[bool],
        is_second: bool = False,
    ) -> None:
        """Read one batch, and set `right` for the blocks that are correct."""
        fetched, headers = self._fetch(indices, keys, into)
        wrong: dict[int, str] = {}
        for position, header in headers.items():
            i = indices[position]
            if header is None:
                wrong[i] = "not this block's header"
            elif header.checksum != fetched.checksums[position]:
                wrong[i] = "checksum"
            else:
                right[i] = True
                if keys[i] not in self._known:
                    self._note_known(header.name)
        self._note_codes([keys[i] for i in indices], fetched.codes)
        if wrong and not is_second:
            # They may have been removed during the read, and their memory reused. Then they are not listed any more.
            self._read(list(wrong), keys, into, right, is_second=True)
        elif wrong:
            for i, reason in wrong.items():
                self._note_corrupt(keys[i], reason)

    def _fetch(
        self, indices: list[int], keys: Sequence[BlockKey], into: Sequence[HostBytes]
    ) -> tuple[FetchResult, dict[int, ObjectHeader | None]]:
        """Read objects, and return them with the headers of those that arrived, by index. None: not the block's header."""
        store_keys = [self._format.store_key(keys[i]) for i in indices]
        objects = ObjectBuffers(self._format, [into[i] for i in indices], self._headroom_bytes)

        def get(client: RawClient) -> FetchResult:
            self._register(client, objects)
            return fetch(client, self._store_client.engine, store_keys, objects)

        try:
            fetched = self._store_client.wait(self._store_client.submit("read", get), self._call_s)
        except TierUnavailable:
            self._suspect([keys[i] for i in indices])
            raise
        headers = {
            position: self._format.unpack(objects.header(position), keys[indices[position]])
            for position in fetched.checksums
        }
        return fetched, headers

    def _note_codes(self, keys: Sequence[BlockKey], codes: Sequence[int]) -> None:
        """Record objects that could not be read, are gone, or have the wrong size."""
        failed: list[BlockKey] = []
        for key, code in zip(keys, codes, strict=True):
            if code == TRANSFER_FAILED:
                failed.append(key)
            elif code == NOT_FOUND:
                self._known.forget([key])
            elif code == WRONG_SIZE or 0 <= code != self._format.object_bytes:
                self._note_corrupt(key, f"{code} instead of {self._format.object_bytes} bytes")
        if failed:
            self._note_failed(failed)
        self._store_client.check_codes(list(codes))

    def _note_failed(self, keys: Sequence[BlockKey]) -> None:
        """Find out why reads failed: the owner is dead, or the object is too short for the buffers."""
        store_keys = [self._format.store_key(key) for key in keys]
        sizes = self._store_client.wait(
            self._store_client.submit("find", lambda client: [int(client.get_size(key)) for key in store_keys]),
            self._call_s,
        )
        short = [key for key, size in zip(keys, sizes, strict=True) if 0 <= size < self._format.object_bytes]
        for key in short:
            self._note_corrupt(key, f"fewer than {self._format.object_bytes} bytes")
        if lost := [key for key in keys if key not in short]:
            self._errors += 1
            self._suspect(lost)

    def _note_corrupt(self, key: BlockKey, reason: str) -> None:
        self._corrupt += 1
        log.warning("mooncake_corrupt", block=key.hex(), reason=reason)
        self._known.forget([key])
        self._remove([key])

    # ---- writing

    def _missing(self, names: Sequence[BlockName], found: Sequence[int], taken: list[bool]) -> list[int]:
        """Return the indices of the blocks to write, and set `taken` for those that are stored already.

        A listed block whose owner is dead is removed first, because the master would not accept it a second time.
        """
        suspect = self._suspects.find(self._store_client, [name.key for name in names])
        missing, unreadable = [], []
        for i, (name, is_there) in enumerate(zip(names, found, strict=True)):
            if is_there == 1 and name.key not in suspect:
                taken[i] = True
                self._note_known(name)
                continue
            missing.append(i)
            if is_there == 1:
                unreadable.append(name.key)
        if unreadable:
            self._store_client.wait(self._remove(unreadable), self._call_s)
        return missing

    def _write(
        self,
        indices: list[int],
        names: Sequence[BlockName],
        data: Sequence[HostBytes],
        checksums: Sequence[int],
        taken: list[bool],
    ) -> None:
        packed = {i: self._format.pack(names[i], checksums[i]) for i in indices}
        sent = {i: header for i, header in packed.items() if header is not None}
        if not sent:
            return
        store_keys = [self._format.store_key(names[i].key) for i in sent]
        objects = ObjectBuffers(self._format, [data[i] for i in sent], self._headroom_bytes)
        for position, header in enumerate(sent.values()):
            objects.put_header(position, header)
        # The buffers of a call that hangs may change. Then the checksum of the stored bytes is wrong.
        call = self._store_client.submit("write", lambda client: self._put(client, store_keys, objects))
        codes = self._store_client.wait(call, self._call_s + sum(_FULL_WAITS_S))
        for i, code in zip(sent, codes, strict=True):
            if code == 0:
                taken[i] = True
                self._note_known(names[i])
        if any(code != 0 for code in codes):
            self._write_pause_until_s = time.monotonic() + _WRITE_PAUSE_S
        if any(code not in (0, NO_SPACE) for code in codes):
            self._errors += 1
        self._store_client.check_codes(codes)

    def _put(self, client: RawClient, store_keys: list[str], objects: ObjectBuffers) -> list[int]:
        self._register(client, objects)
        codes = list(
            client.batch_put_from_multi_buffers(store_keys, objects.places, objects.sizes, self._store_client.config())
        )
        for wait_s in _FULL_WAITS_S:
            full = [i for i, code in enumerate(codes) if code == NO_SPACE]
            if not full:
                break
            time.sleep(wait_s)
            again = client.batch_put_from_multi_buffers(
                [store_keys[i] for i in full],
                [objects.places[i] for i in full],
                objects.sizes[: len(full)],
                self._store_client.config(),
            )
            for i, code in zip(full, again, strict=True):
                codes[i] = code
        return codes

    def _register(self, client: RawClient, objects: ObjectBuffers) -> None:
        """Register buffers for RDMA, which reaches only registered memory. They stay registered and referenced, so that
        the address is never reused for other memory. There are only as many as the store's buffer pool has."""
        if self._is_tcp:
            return
        for buffer, (address, *_), (size, *_) in zip(objects.buffers, objects.places, objects.sizes, strict=True):
            if address not in self._registered:
                self._registered[address] = buffer
                client.register_buffer(address, size)

    # ---- known and suspect blocks

    def _note_known(self, name: BlockName) -> None:
        self._suspects.remove(name.key)
        self._known.add(name)

    def _suspect(self, keys: Sequence[BlockKey]) -> None:
        self._suspects.add(keys)
        self._known.forget(keys)

    def _remove(self, keys: Sequence[BlockKey]) -> Future[list[int]]:
        store_keys = [self._format.store_key(key) for key in keys]
        return self._store_client.submit("write", lambda client: list(client.batch_remove(store_keys, True)))


def _batches(items: Sequence[T], max_items: int) -> Iterator[list[T]]:
    """Split items into the fewest batches of equal size. A call for a few left-over items would cost almost as much as
    a full one."""
    count = -(-len(items) // max_items)
    ends = [len(items) * number // count for number in range(1, count + 1)]
    for start, end in zip([0, *ends], ends, strict=False):
        yield list(items[start:end])

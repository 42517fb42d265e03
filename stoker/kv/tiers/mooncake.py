"""The Mooncake tier: blocks in the RAM (and on the SSDs) of all workers of a cluster, found through one master.

Bytes go through a ring of staging buffers, so that a call that hangs keeps nothing of the caller's. Copy and checksum of one
batch run while the next one is on the wire. What the store does when parts of it die is written in mooncake_link.py; here
it means: a miss, or a block that is declined.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, TypeVar

import numpy as np

from stoker.base.config import StoreSettings
from stoker.base.ids import BlockKey
from stoker.base.log import EventLog
from stoker.kv.checksum import copy_checksummed
from stoker.kv.tiers.contract import TIERS, HostBytes, Tier, TierContext, TierStats
from stoker.kv.tiers.mooncake_doubts import Doubts
from stoker.kv.tiers.mooncake_link import NO_SPACE, NOT_FOUND, TRANSFER_FAILED, WRONG_SIZE, Client, MooncakeLink
from stoker.kv.tiers.mooncake_object import ObjectFormat
from stoker.kv.tiers.names import parents_first
from stoker.kv.tiers.staging import Ring
from stoker.kv.transfer import BlockName, TierUnavailable

_BATCH_BYTES = 8 << 20
_BATCH_BLOCKS = 64
_BATCHES = 6  # that fit into the ring
_FIND_S = 0.1
_CALL_S = 0.5
_SLOWEST_BYTES_PER_S = 50e6  # a call may take _CALL_S and its bytes at this rate
_FULL_WAITS_S = (0.01, 0.03, 0.05)  # the master evicts in the background
_REST_S = 1.0  # after a put that failed: no more of them
_KNOWN = 1 << 16
_AUDIT_EVERY_S = 5.0
_AUDIT = 16
_AT_A_TIME = 1024
_SSD_GRACE_S = 6.0  # what lies on SSDs is listed again by itself

log = EventLog("kv.mooncake")
T = TypeVar("T")


@TIERS.register("mooncake")
def mooncake_tier(settings: StoreSettings, context: TierContext) -> Tier | None:
    if settings.mooncake_master is None:
        return None
    return MooncakeTier(settings, context)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Some blocks of one call, on the wire: `indices` of the call, in `slots` of the ring."""

    indices: list[int]
    slots: list[int]
    call: Future[list[int]]


class MooncakeTier:
    medium: ClassVar[str] = "MOONCAKE"
    shared = True

    def __init__(self, settings: StoreSettings, context: TierContext) -> None:
        self._format = ObjectFormat(context.fingerprint, context.layout)
        self._on_evicted = context.on_evicted
        self._on_forgotten = context.on_forgotten
        self._segment_bytes = int(settings.mooncake_segment_gib * 2**30)
        self._has_ssd = settings.mooncake_ssd_dir is not None
        self._batch_blocks = max(1, min(_BATCH_BLOCKS, _BATCH_BYTES // self._format.object_bytes))
        self._ring = Ring(_BATCHES * self._batch_blocks, self._format.object_bytes)
        self._call_s = _CALL_S + self._batch_blocks * self._format.object_bytes / _SLOWEST_BYTES_PER_S
        self._lock = threading.Lock()
        self._known: dict[BlockKey, bytes] = {}  # headers of what we wrote or read, the oldest first
        self._doubts = Doubts(self._format)
        self._rest_until_s = 0.0
        self._audit_s = 0.0
        self._corrupt = self._errors = self._evicted = 0
        self._link = MooncakeLink(settings, self)

    # ---- the contract

    def find(self, keys: Sequence[BlockKey]) -> list[bool]:
        store_keys = [self._format.store_key(key) for key in keys]
        try:
            found = self._exist(store_keys, _FIND_S)
            doubtful = self._doubts.of(self._link, keys)
        except TierUnavailable:
            return [False] * len(keys)
        self._forget([key for key, is_there in zip(keys, found, strict=True) if is_there == 0])
        return [is_there == 1 and key not in doubtful for key, is_there in zip(keys, found, strict=True)]

    def read(self, keys: Sequence[BlockKey], into: Sequence[HostBytes]) -> list[bool]:
        self._link.check()
        right = [False] * len(keys)
        doubtful = self._doubts.of(self._link, keys)
        # Of a key that stands twice in a batch, the client answers for one.
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        wanted = [i for key, i in sorted(first.items(), key=lambda item: item[1]) if key not in doubtful]
        on_the_wire: deque[_Batch] = deque()
        try:
            for indices in _batches(wanted, self._batch_blocks):
                # The next batch is on the wire while this thread checks the last one, if the ring has room for both.
                slots = self._ring.take(len(indices), 0.0 if on_the_wire else self._call_s)
                if not slots and on_the_wire:
                    self._finish_read(on_the_wire.popleft(), keys, into, right)
                    slots = self._ring.take(len(indices), self._call_s)
                on_the_wire.append(self._start_read(indices, slots, keys))
                if len(on_the_wire) == 2:
                    self._finish_read(on_the_wire.popleft(), keys, into, right)
            while on_the_wire:
                self._finish_read(on_the_wire.popleft(), keys, into, right)
        except TierUnavailable:
            self._errors += 1
            if not any(right):
                raise
        finally:
            self._leave(on_the_wire)
        for i, key in enumerate(keys):
            if first[key] != i and right[first[key]]:
                np.copyto(into[i], into[first[key]])
                right[i] = True
        return right

    def write(self, names: Sequence[BlockName], data: Sequence[HostBytes]) -> list[bool]:
        taken = [False] * len(names)
        if time.monotonic() < self._rest_until_s:
            return taken
        on_the_wire: deque[_Batch] = deque()
        try:
            missing = self._missing(names, taken)
            first = {names[i].key: i for i in reversed(missing)}
            for indices in _batches(sorted(first.values()), self._batch_blocks):
                batch = self._start_write(indices, names, data)
                if batch is not None:
                    on_the_wire.append(batch)
                if len(on_the_wire) == 2:
                    self._finish_write(on_the_wire.popleft(), names, taken)
                if time.monotonic() < self._rest_until_s:
                    break
            while on_the_wire:
                self._finish_write(on_the_wire.popleft(), names, taken)
            for i in missing:
                taken[i] = taken[first[names[i].key]]
        except TierUnavailable:
            self._errors += 1
            self._rest_until_s = time.monotonic() + _REST_S
        finally:
            self._leave(on_the_wire)
        return taken

    def drop(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self._known.pop(key, None)
        try:
            self._link.wait(self._remove(keys), self._call_s)
        except TierUnavailable:
            self._errors += 1

    def names(self) -> Iterator[BlockName]:
        """What this worker wrote or read; others tell of theirs."""
        with self._lock:
            known = list(self._known.items())
        headers = (self._format.unpack(packed, key) for key, packed in known)
        return parents_first([header.name for header in headers if header is not None])

    def stats(self) -> TierStats:
        return TierStats(
            blocks=len(self._known),
            used_bytes=len(self._known) * self._format.object_bytes,
            capacity_bytes=self._segment_bytes,
            evicted=self._evicted,
            corrupt=self._corrupt,
            errors=self._errors,
        )

    def close(self) -> None:
        self._link.close()

    # ---- on the link's thread

    def connected(self, client: Client) -> None:
        client.register_buffer(self._ring.memory.ctypes.data, self._ring.memory.nbytes)

    def forgotten(self, client: Client) -> None:
        if self._has_ssd:
            time.sleep(_SSD_GRACE_S)
        with self._lock:
            keys = list(self._known)
        lost = self._lost_of(client, keys)
        log.event("mooncake_forgot", known=len(keys), lost=len(lost))
        if lost:
            self._forget(lost)
            self._on_forgotten(lost)

    def tick(self, client: Client) -> None:
        """Blocks go without a word. Those we have known longest went first, so a look at a few of them tells; but a look
        makes them young again in the master's eyes, so it is a few of them, seldom."""
        now = time.monotonic()
        if now - self._audit_s < _AUDIT_EVERY_S:
            return
        self._audit_s = now
        count = _AUDIT
        while True:
            with self._lock:
                oldest = list(self._known)[:count]
            lost = self._lost_of(client, oldest)
            self._forget(lost)
            with self._lock:
                for key in oldest:
                    if (packed := self._known.pop(key, None)) is not None:
                        self._known[key] = packed
            if not lost:
                return
            count = _AT_A_TIME

    def _lost_of(self, client: Client, keys: Sequence[BlockKey]) -> list[BlockKey]:
        lost: list[BlockKey] = []
        for some in _batches(keys, _AT_A_TIME):
            found = client.batch_is_exist([self._format.store_key(key) for key in some])
            lost += [key for key, is_there in zip(some, found, strict=True) if is_there == 0]
        return lost

    # ---- reading

    def _exist(self, store_keys: list[str], deadline_s: float) -> list[int]:
        if not store_keys:
            return []
        found = self._link.wait(
            self._link.submit("find", lambda client: list(client.batch_is_exist(store_keys))), deadline_s
        )
        self._link.heard(found)
        return found

    def _start_read(self, indices: list[int], slots: list[int], keys: Sequence[BlockKey]) -> _Batch:
        if not slots:
            raise TierUnavailable("Mooncake: all staging buffers are in calls that hang")
        store_keys = [self._format.store_key(keys[i]) for i in indices]
        addresses, sizes = self._ring.addresses(slots), [self._format.object_bytes] * len(slots)
        try:
            call = self._link.submit("read", lambda client: list(client.batch_get_into(store_keys, addresses, sizes)))
        except TierUnavailable:
            self._ring.give_back(slots)
            raise
        return _Batch(indices, slots, call)

    def _finish_read(
        self, batch: _Batch, keys: Sequence[BlockKey], into: Sequence[HostBytes], right: list[bool]
    ) -> None:
        try:
            codes = self._link.wait(batch.call, self._call_s)
        except TierUnavailable:
            self._leave([batch])
            self._give_up([keys[i] for i in batch.indices])
            raise
        try:
            failed: list[BlockKey] = []
            for i, slot, code in zip(batch.indices, batch.slots, codes, strict=True):
                if code == self._format.object_bytes:
                    right[i] = self._take_in(keys[i], self._ring.at(slot), into[i])
                elif code >= 0 or code == WRONG_SIZE:
                    self._note_corrupt(keys[i], f"{code} instead of {self._format.object_bytes} bytes")
                elif code == NOT_FOUND:
                    self._forget([keys[i]])
                elif code == TRANSFER_FAILED:
                    failed.append(keys[i])
            if failed:
                self._errors += 1
                self._give_up(failed)
        finally:
            self._ring.give_back(batch.slots)
        self._link.heard(codes)

    def _take_in(self, key: BlockKey, src: HostBytes, into: HostBytes) -> bool:
        header = self._format.unpack(src, key)
        if header is None:
            self._note_corrupt(key, "not this block's header")
            return False
        if copy_checksummed(into, src[self._format.header_bytes :]) != header.checksum:
            self._note_corrupt(key, "checksum")
            return False
        if key not in self._known:
            self._know(header.name, header.checksum)
        return True

    def _note_corrupt(self, key: BlockKey, reason: str) -> None:
        self._corrupt += 1
        log.warning("mooncake_corrupt", block=key.hex(), reason=reason)
        self._forget([key])
        self._remove([key])

    # ---- writing

    def _missing(self, names: Sequence[BlockName], taken: list[bool]) -> list[int]:
        """Those that must be sent. What is listed but lies with the dead is taken off the list, or it would be kept there."""
        store_keys = [self._format.store_key(name.key) for name in names]
        found = self._exist(store_keys, self._call_s)
        doubtful = self._doubts.of(self._link, [name.key for name in names])
        missing, unreadable = [], []
        for i, (name, is_there) in enumerate(zip(names, found, strict=True)):
            if is_there == 1 and name.key not in doubtful:
                taken[i] = True
                self._know(name, 0)
                continue
            missing.append(i)
            if is_there == 1:
                unreadable.append(name.key)
        if unreadable:
            self._link.wait(self._remove(unreadable), self._call_s)
        return missing

    def _start_write(self, indices: list[int], names: Sequence[BlockName], data: Sequence[HostBytes]) -> _Batch | None:
        slots = self._ring.take(len(indices), self._call_s)
        if not slots:
            raise TierUnavailable("Mooncake: all staging buffers are in calls that hang")
        sent: list[int] = []
        used: list[int] = []
        for i, slot in zip(indices, slots, strict=True):
            buffer = self._ring.at(slot)
            checksum = copy_checksummed(buffer[self._format.header_bytes :], data[i])
            packed = self._format.pack(names[i], checksum)
            if packed is not None:
                buffer[: len(packed)] = np.frombuffer(packed, dtype=np.uint8)
                sent.append(i)
                used.append(slot)
        self._ring.give_back([slot for slot in slots if slot not in used])
        if not sent:
            return None
        store_keys = [self._format.store_key(names[i].key) for i in sent]
        addresses = self._ring.addresses(used)
        try:
            call = self._link.submit("write", lambda client: self._put(client, store_keys, addresses))
        except TierUnavailable:
            self._ring.give_back(used)
            raise
        return _Batch(sent, used, call)

    def _put(self, client: Client, store_keys: list[str], addresses: list[int]) -> list[int]:
        sizes = [self._format.object_bytes] * len(store_keys)
        codes = list(client.batch_put_from(store_keys, addresses, sizes, self._link.config()))
        for wait_s in _FULL_WAITS_S:
            full = [i for i, code in enumerate(codes) if code == NO_SPACE]
            if not full:
                break
            time.sleep(wait_s)
            again = client.batch_put_from(
                [store_keys[i] for i in full], [addresses[i] for i in full], sizes[: len(full)], self._link.config()
            )
            for i, code in zip(full, again, strict=True):
                codes[i] = code
        return codes

    def _finish_write(self, batch: _Batch, names: Sequence[BlockName], taken: list[bool]) -> None:
        try:
            codes = self._link.wait(batch.call, self._call_s + sum(_FULL_WAITS_S))
        finally:
            self._leave([batch])
        for i, code in zip(batch.indices, codes, strict=True):
            if code == 0:
                taken[i] = True
                self._know(names[i], 0)
        if any(code != 0 for code in codes):
            self._rest_until_s = time.monotonic() + _REST_S
        if any(code not in (0, NO_SPACE) for code in codes):
            self._errors += 1
        self._link.heard(codes)

    # ---- what we know

    def _know(self, name: BlockName, checksum: int) -> None:
        """The checksum is not needed to tell of a block."""
        packed = self._format.pack(name, checksum)
        self._doubts.remove(name.key)
        with self._lock:
            if packed is not None:
                self._known[name.key] = packed
            while len(self._known) > _KNOWN:
                del self._known[next(iter(self._known))]

    def _forget(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            gone = [key for key in keys if self._known.pop(key, None) is not None]
        if gone:
            self._evicted += len(gone)
            self._on_evicted(gone)

    def _give_up(self, keys: Sequence[BlockKey]) -> None:
        self._doubts.add(keys)
        self._forget(keys)

    def _remove(self, keys: Sequence[BlockKey]) -> Future[list[int]]:
        store_keys = [self._format.store_key(key) for key in keys]
        return self._link.submit("write", lambda client: list(client.batch_remove(store_keys, True)))

    def _leave(self, batches: Sequence[_Batch]) -> None:
        """Their slots come back when the calls end."""
        for batch in batches:
            batch.call.add_done_callback(partial(self._came_back, batch.slots))

    def _came_back(self, slots: list[int], call: Future[list[int]]) -> None:
        self._ring.give_back(slots)


def _batches(items: Sequence[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(items), size):
        yield list(items[start : start + size])

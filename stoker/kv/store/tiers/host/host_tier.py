"""The host tier: blocks in this machine's RAM, private to one worker or shared by all workers that use the same store
name.

A named store is a file in /dev/shm that outlives its users until it is deleted. Without a name it is memory of this
process. The table is changed under a short lock that the kernel releases if its holder dies. Bytes are copied outside
the lock. Readers lock nothing: they copy, and check afterwards that the slot still has the same generation.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from socket import gethostname
from typing import ClassVar

import numpy as np

from stoker.base.config import StoreSettings
from stoker.base.errors import ConfigError
from stoker.base.ids import BlockKey
from stoker.base.log import EventLog
from stoker.kv.blocks.transfer import BlockName, TierUnavailable
from stoker.kv.device.checksum import copy_with_checksums
from stoker.kv.device.helper_threads import HelperThreads, copy_all, num_copy_threads
from stoker.kv.store.tiers.host.host_known_slots import KnownSlots
from stoker.kv.store.tiers.host.host_memory import LOCK_S, lock, private_memory, shared_memory, unlock
from stoker.kv.store.tiers.host.host_table import READY, WRITING, HostGeometry, HostTable, packed
from stoker.kv.store.tiers.name_order import parents_first
from stoker.kv.store.tiers.process_liveness import is_alive, started_at
from stoker.kv.store.tiers.tier import HostBytes, Tier, TierContext, TierStats, register_tier

log = EventLog("kv.host")

_GIB = 1 << 30
_WRITE_S = 60.0  # a write that takes longer is considered abandoned
_BATCH = 32  # most blocks that one call writes at a time
_CATCH_UP_SLOTS = 1 << 16  # slots checked under one lock, which takes less than a millisecond
_BATCH_BYTES = 32 << 20  # the kernel may have to allocate their memory, under the lock


@register_tier("host", distance=100)
def host_tier(settings: StoreSettings, context: TierContext) -> Tier | None:
    if settings.host_gib <= 0:
        return None
    return HostTier(int(context.share * settings.host_gib * _GIB), context, settings.name)


@dataclass(slots=True, eq=False)
class _PendingWrite:
    """A block that is being written."""

    name: BlockName
    data: HostBytes
    checksum: int
    use_ns: int
    slot: int = -1
    generation: int = 0
    is_here: bool = False


class HostTier:
    """A tier in RAM. See the contract in tier.py."""

    medium: ClassVar[str] = "CPU"

    def __init__(self, capacity_bytes: int, context: TierContext, name: str | None = None) -> None:
        layout = context.layout
        self._on_evicted = context.on_evicted
        self.shared_location = None if name is None else f"{gethostname()}:{name}"
        geometry = HostGeometry.of(capacity_bytes, layout)
        if geometry.num_slots == 0:
            raise ConfigError(
                f"store.host_gib={capacity_bytes / _GIB:g} is smaller than one block of {layout.block_bytes} bytes; raise it"
            )
        self._thread_lock = threading.Lock()
        self._stats_lock = threading.Lock()
        self._evicted = self._corrupt = self._errors = 0
        self._eviction_candidates: deque[tuple[int, int]] = deque()  # slots and the last use that made them candidates
        self._owner = (os.getpid(), started_at(os.getpid()))
        if name is None:
            self._fd, memory = private_memory(geometry)
        else:
            self._fd, memory = shared_memory(name, context.fingerprint, geometry)
        self._table: HostTable | None = HostTable(memory, geometry)
        self._blocks_at = geometry.offsets()["blocks"]
        self._slot_bytes = geometry.slot_bytes
        self._known_slots = KnownSlots(geometry.num_slots)
        with self._locked_table() as table:
            self._reclaim_abandoned(table)
            self._known_slots.lost(table, slice(0, table.num_fresh))
        self._unpin = _pin(self._table.slab)
        self._threads = HelperThreads(num_copy_threads(), "kv-host")

    def find(self, keys: Sequence[BlockKey]) -> list[bool]:
        if not keys:
            return []
        found: list[bool] = self._open().ready(packed(keys)).tolist()
        return found

    def read(self, keys: Sequence[BlockKey], into: Sequence[HostBytes]) -> list[bool]:
        if not keys:
            return []
        table = self._open()
        now_ns = time.monotonic_ns()
        found: dict[int, tuple[int, int, int]] = {}  # for READY slots: slot, generation, checksum
        for i, slot in enumerate(table.lookup(packed(keys)).tolist()):
            if slot >= 0:
                generation, checksum = int(table.generations[slot]), int(table.checksums[slot])
                if table.states[slot] == READY and table.key(slot) == keys[i]:
                    found[i] = slot, generation, checksum
        checksums = copy_with_checksums(
            self._threads, [into[i] for i in found], [table.block(slot) for slot, _, _ in found.values()]
        )
        done = [False] * len(keys)
        wrong = []
        for (i, (slot, generation, checksum)), data_checksum in zip(found.items(), checksums, strict=True):
            if int(table.generations[slot]) != generation:
                continue  # the slot was reused meanwhile
            if _keyed_checksum(keys[i], data_checksum) == checksum:
                table.last_use_ns[slot] = now_ns - i
                done[i] = True
            else:
                wrong.append((slot, generation))
        if wrong:
            self._drop_wrong(wrong)
        return done

    def write(self, names: Sequence[BlockName], data: Sequence[HostBytes], checksums: Sequence[int]) -> list[bool]:
        # The first blocks of a chain count as the last used ones: without them the rest cannot be found.
        now_ns = time.monotonic_ns()
        items = {
            name.key: _PendingWrite(name, block, data_checksum, now_ns - i)
            for i, (name, block, data_checksum) in enumerate(zip(names, data, checksums, strict=True))
        }
        waiting = list(items.values())
        step = max(1, min(_BATCH, _BATCH_BYTES // self._slot_bytes))
        for start in range(0, len(waiting), step):
            self._write_batch(waiting[start : start + step], now_ns - len(names))
        return [items[name.key].is_here for name in names]

    def drop(self, keys: Sequence[BlockKey]) -> None:
        if not keys:
            return
        with self._locked_table() as table:
            for slot in table.lookup(packed(keys)).tolist():
                if slot >= 0 and table.states[slot] == READY:
                    self._remove(table, slot)
                    table.give_back(slot)

    def catch_up(self) -> None:
        if self.shared_location is None:
            return
        for start in range(0, self._open().num_fresh, _CATCH_UP_SLOTS):
            with self._locked_table() as table:
                # Reported under the lock, so that a block that this process writes again is reported later.
                if lost := self._known_slots.lost(table, slice(start, start + _CATCH_UP_SLOTS)):
                    self._on_evicted(lost)

    def names(self) -> Iterator[BlockName]:
        table = self._open()
        names = (table.name(slot) for slot in np.flatnonzero(table.states == READY).tolist())
        return parents_first([name for name in names if name is not None])

    def stats(self) -> TierStats:
        table = self._open()
        blocks, size = table.count_ready(), table.geometry.slot_bytes
        with self._stats_lock:
            return TierStats(
                blocks=blocks,
                used_bytes=blocks * size,
                capacity_bytes=table.geometry.num_slots * size,
                evicted=self._evicted,
                corrupt=self._corrupt,
                errors=self._errors,
            )

    def close(self) -> None:
        with self._thread_lock:
            if self._table is None:
                return
            self._unpin()
            self._table = None  # the mapping is released by the last read that uses it
            os.close(self._fd)
        self._threads.close()

    def _write_batch(self, items: list[_PendingWrite], before_ns: int) -> None:
        """Write blocks: reserve their slots under the lock, copy without it, then mark them as READY under the lock."""
        wanted: list[_PendingWrite] = []
        begun: list[_PendingWrite] = []
        lost: list[BlockKey] = []
        with self._locked_table() as table:
            # Slots of dead writers could neither be read nor written again.
            self._reclaim_abandoned(table)
            for item, slot in zip(items, table.lookup(packed([item.name.key for item in items])).tolist(), strict=True):
                if slot >= 0 and table.states[slot] == READY:
                    # before slots are evicted, so that no block of this call evicts another
                    table.last_use_ns[slot] = item.use_ns
                    item.is_here = True
                elif slot < 0 and table.can_hold(item.name):  # otherwise another worker is writing it
                    wanted.append(item)
            for item in wanted:
                slot = self._take_slot(table, before_ns, lost)
                if slot is None:
                    break
                item.slot = slot
                item.generation = table.begin(slot, item.name, self._owner, item.use_ns)
                begun.append(item)
        if lost:
            self._count(evicted=len(lost))
            self._on_evicted(lost)
        if not begun:
            return
        copy_all(self._threads, [table.block(item.slot) for item in begun], [item.data for item in begun])
        with self._locked_table() as table:
            for item in begun:
                # Otherwise this write took so long that another process has reclaimed the slot.
                if int(table.generations[item.slot]) == item.generation and table.states[item.slot] == WRITING:
                    table.finish(item.slot, _keyed_checksum(item.name.key, item.checksum), item.use_ns)
                    self._known_slots.note(table, item.slot)
                    item.is_here = True

    def _take_slot(self, table: HostTable, before_ns: int, lost: list[BlockKey]) -> int | None:
        """Return a slot to write into, or None. Evicted keys are appended to `lost`."""
        slot = table.take_free()
        if slot is None and table.num_fresh < table.geometry.num_slots and self._has_memory(table):
            slot = table.take_fresh()
        if slot is None:
            slot = self._evict(table, before_ns, lost)
        return slot

    def _has_memory(self, table: HostTable) -> bool:
        """Allocate the memory of the next fresh slot. If /dev/shm is full, touching an unallocated page would kill the
        process; here it is an error that can be handled."""
        try:
            os.posix_fallocate(self._fd, self._blocks_at + table.num_fresh * self._slot_bytes, self._slot_bytes)
        except OSError as error:
            self._count(errors=1)
            log.warning("host_memory_full", blocks=table.num_fresh, reason=error.strerror)
            return False
        return True

    def _evict(self, table: HostTable, before_ns: int, lost: list[BlockKey]) -> int | None:
        """Evict and return the least recently used slot, or None if only blocks of this call are left. A candidate that
        was not used since it was found is still among the oldest, so all slots are searched only once in many
        evictions."""
        for is_new in (False, True):
            if is_new:
                oldest = table.oldest(max(_BATCH, table.geometry.num_slots // 64))
                self._eviction_candidates = deque((slot, int(table.last_use_ns[slot])) for slot in oldest)
            while self._eviction_candidates:
                slot, use_ns = self._eviction_candidates.popleft()
                if table.states[slot] != READY or int(table.last_use_ns[slot]) != use_ns:
                    continue
                # Blocks of one call never evict each other: the first ones of a chain are worth most.
                if use_ns >= before_ns:
                    self._eviction_candidates.appendleft((slot, use_ns))
                    return None
                lost.append(table.key(slot))
                self._remove(table, slot)
                return slot
        return None

    def _remove(self, table: HostTable, slot: int) -> None:
        table.clear(slot)
        self._known_slots.forget(slot)

    def _reclaim_abandoned(self, table: HostTable) -> None:
        """Free the slots of writers that died or take too long."""
        slots = np.flatnonzero(table.states == WRITING)
        if not len(slots):
            return
        owners = {
            (pid, started): is_alive(pid, started) for pid, started in np.unique(table.owners[slots], axis=0).tolist()
        }
        oldest_ns = time.monotonic_ns() - int(_WRITE_S * 1e9)
        dead = [
            slot
            for slot in slots.tolist()
            if int(table.last_use_ns[slot]) < oldest_ns or not owners[tuple(table.owners[slot].tolist())]
        ]
        for slot in dead:
            table.clear(slot)
            table.give_back(slot)
        if dead:
            log.event("host_slots_reclaimed", slots=len(dead))

    def _drop_wrong(self, wrong: list[tuple[int, int]]) -> None:
        """Remove blocks whose checksum was wrong."""
        lost = []
        with self._locked_table() as table:
            for slot, generation in wrong:
                if int(table.generations[slot]) == generation and table.states[slot] == READY:
                    lost.append(table.key(slot))
                    self._remove(table, slot)
                    table.give_back(slot)
        if lost:
            self._count(corrupt=len(lost))
            log.warning("host_blocks_corrupt", blocks=len(lost), first=lost[0].hex())
            self._on_evicted(lost)

    def _count(self, evicted: int = 0, corrupt: int = 0, errors: int = 0) -> None:
        with self._stats_lock:
            self._evicted += evicted
            self._corrupt += corrupt
            self._errors += errors

    def _open(self) -> HostTable:
        table = self._table
        if table is None:
            raise TierUnavailable("the host tier is closed")
        return table

    @contextmanager
    def _locked_table(self) -> Iterator[HostTable]:
        """Lock the table for changes, and repair it if the last holder died during a change."""
        with self._thread_lock:
            table = self._open()
            if not lock(self._fd, LOCK_S):
                self._count(errors=1)
                raise TierUnavailable(f"another process has held the host tier's lock for {LOCK_S:g} s: is it stopped?")
            try:
                if table.is_dirty:  # the last holder died during a change
                    log.warning("host_table_rebuilt", blocks=table.count_ready())
                    table.rebuild(is_alive)
                table.is_dirty = True
                yield table
                table.is_dirty = False
            finally:
                unlock(self._fd)


def _keyed_checksum(key: BlockKey, data_checksum: int) -> int:
    """Combine a block's checksum with its key, so that a slot with another block's bytes is found wrong too."""
    low, high = struct.unpack("<QQ", key)
    sealed: int = (data_checksum + 0x9E3779B97F4A7C15 * low + 0xC2B2AE3D27D4EB4F * high) % (1 << 64)
    return sealed


def _pin(slab: HostBytes) -> Callable[[], None]:
    """Page-lock the memory if a GPU is in use, so that its copy engine can access it directly. This allocates all of it
    at once. Returns a function that undoes it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return lambda: None
    runtime = torch.cuda.cudart()
    failed = runtime.cudaHostRegister(slab.ctypes.data, slab.nbytes, 0)
    if int(failed):
        log.warning("host_memory_not_pinned", bytes=slab.nbytes, reason=str(failed))
        return lambda: None
    return lambda: runtime.cudaHostUnregister(slab.ctypes.data)

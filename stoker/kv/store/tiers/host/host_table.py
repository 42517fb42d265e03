"""HostTable: the layout of the host tier's memory, and which slot holds which key.

The whole table is in the mapped memory, so that every process that maps it sees the same. It knows nothing of files,
locks and processes. Changes are made under the tier's lock. Lookups need no lock: a result is a hint, to be checked by
generation and checksum.

A slot's state is the last field written when the slot is filled, and the first when it is emptied. A process that dies
in between leaves no slot READY under a wrong key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from mmap import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.base.ids import BlockKey
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.blocks.transfer import BlockName
from stoker.kv.store.tiers.tier import HostBytes

MAGIC = b"stokerkv"
VERSION = 2
FREE, WRITING, READY = 0, 1, 2

_PAGE = 4096
_EMPTY, _TOMBSTONE = 0, -1  # bucket values; any other value is slot + 1
_MAX_PROBES = 1024
_SALT_BYTES = 64
_NO_SALT = 255
_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("is_initialized", "<u4"),
        ("num_slots", "<u8"),
        ("block_bytes", "<u8"),
        ("block_tokens", "<u8"),
        ("layout", "S256"),
        ("dirty", "<u8"),  # a change has begun and not ended, so the table may be inconsistent
        ("num_fresh", "<u8"),  # slots from this one on were never used, and take no memory yet
        ("num_free", "<u8"),  # number of entries of `free`
        ("num_tombstones", "<u8"),  # buckets whose key was removed; lookups continue after them
    ]
)


@dataclass(frozen=True, slots=True)
class HostGeometry:
    """The sizes that determine the layout of the memory."""

    num_slots: int
    block_bytes: int
    block_tokens: int
    layout: str

    @classmethod
    def of(cls, capacity_bytes: int, layout: KvLayout) -> HostGeometry:
        """Return the geometry with as many slots as fit into `capacity_bytes`."""
        one_slot = cls(1, layout.block_bytes, layout.block_tokens, layout.fingerprint)
        return replace(one_slot, num_slots=capacity_bytes // one_slot.slot_bytes)

    def __str__(self) -> str:
        return f"{self.num_slots} blocks of {self.block_bytes} bytes, {self.block_tokens} tokens each, layout {self.layout}"

    @property
    def slot_bytes(self) -> int:
        """Slots begin on a page boundary, so that a GPU's copy engine and direct I/O can use them."""
        return -(-self.block_bytes // _PAGE) * _PAGE

    @property
    def num_buckets(self) -> int:
        return 1 << (4 * self.num_slots - 1).bit_length()

    def arrays(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of each array of the table."""
        slots = self.num_slots
        return {
            "buckets": ("<i4", (self.num_buckets,)),
            "free": ("<i4", (slots,)),
            "states": ("u1", (slots,)),
            "generations": ("<u8", (slots,)),
            "keys": ("<u8", (slots, 2)),
            "checksums": ("<u8", (slots,)),
            "last_use_ns": ("<u8", (slots,)),
            "owners": ("<u8", (slots, 2)),  # for a slot being written: pid and start time of the writer
            "parents": ("<u8", (slots, 2)),
            "num_tokens": ("<u4", (slots,)),
            "token_ids": ("<u4", (slots, self.block_tokens)),
            "salt_bytes": ("u1", (slots,)),
            "salts": ("u1", (slots, _SALT_BYTES)),
        }

    def offsets(self) -> dict[str, int]:
        """Return where each array begins, and where the blocks begin."""
        offset, offsets = _PAGE, {}
        for name, (dtype, shape) in self.arrays().items():
            offsets[name] = offset
            size = np.dtype(dtype).itemsize * int(np.prod(shape))
            offset += -(-size // 64) * 64
        offsets["blocks"] = -(-offset // _PAGE) * _PAGE
        return offsets

    @property
    def total_bytes(self) -> int:
        return self.offsets()["blocks"] + self.num_slots * self.slot_bytes


def packed(keys: Sequence[BlockKey]) -> NDArray[np.uint64]:
    """Return the keys as an array of two integers each."""
    return np.frombuffer(b"".join(keys), dtype="<u8").reshape(len(keys), 2)


def read_geometry(memory: mmap) -> HostGeometry | None:
    """Return the geometry that a mapping was made for. None: it was never completed, or was made by another version."""
    header = np.frombuffer(memory, dtype=_HEADER, count=1)[0]
    if header["magic"] != MAGIC or header["version"] != VERSION or not header["is_initialized"]:
        return None
    num_slots, block_bytes, block_tokens = (int(header[name]) for name in ("num_slots", "block_bytes", "block_tokens"))
    return HostGeometry(num_slots, block_bytes, block_tokens, header["layout"].decode())


class HostTable:
    """Views of the mapped memory."""

    def __init__(self, memory: mmap, geometry: HostGeometry) -> None:
        self.geometry = geometry
        self._header = np.frombuffer(memory, dtype=_HEADER, count=1)
        offsets = geometry.offsets()

        def array(name: str) -> NDArray[Any]:
            dtype, shape = geometry.arrays()[name]
            flat = np.frombuffer(memory, dtype=dtype, count=int(np.prod(shape)), offset=offsets[name])
            return flat.reshape(shape)

        self._buckets = array("buckets")
        self._free = array("free")
        self.states = array("states")
        self.generations = array("generations")
        self.keys = array("keys")
        self.checksums = array("checksums")
        self.last_use_ns = array("last_use_ns")
        self.owners = array("owners")
        self._parents = array("parents")
        self._num_tokens = array("num_tokens")
        self._token_ids = array("token_ids")
        self._salt_bytes = array("salt_bytes")
        self._salts = array("salts")
        size = geometry.num_slots * geometry.slot_bytes
        slab = np.frombuffer(memory, dtype=np.uint8, count=size, offset=offsets["blocks"])
        self.slab = slab.reshape(geometry.num_slots, geometry.slot_bytes)
        self._mask = geometry.num_buckets - 1

    def initialize(self) -> None:
        """Initialize memory that is all zeros."""
        for name in ("num_slots", "block_bytes", "block_tokens"):
            self._header[name] = getattr(self.geometry, name)
        self._header["layout"] = self.geometry.layout.encode()
        self._header["magic"] = MAGIC
        self._header["version"] = VERSION
        self._header["is_initialized"] = 1

    # ---- reading, without the lock

    def lookup(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the slot of each key, or -1. Linear probing, one step for all keys at a time."""
        found = np.full(len(keys), -1, dtype=np.int64)
        remaining = np.arange(len(keys))
        buckets = (keys[:, 0] & np.uint64(self._mask)).astype(np.int64)
        for _ in range(_MAX_PROBES):
            entries = self._buckets[buckets].astype(np.int64)
            is_slot = (entries > 0) & (entries <= self.geometry.num_slots)
            hit = is_slot & (self.keys[np.where(is_slot, entries - 1, 0)] == keys[remaining]).all(axis=1)
            found[remaining[hit]] = entries[hit] - 1
            is_unresolved = (entries != _EMPTY) & ~hit
            if not is_unresolved.any():
                break
            remaining = remaining[is_unresolved]
            buckets = (buckets[is_unresolved] + 1) & self._mask
        return found

    def ready(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which keys have a READY slot."""
        slots = self.lookup(keys)
        is_ready: NDArray[np.bool_] = (slots >= 0) & (self.states[slots] == READY)
        return is_ready

    def block(self, slot: int) -> HostBytes:
        return self.slab[slot, : self.geometry.block_bytes]

    def key(self, slot: int) -> BlockKey:
        return BlockKey(self.keys[slot].tobytes())

    def name(self, slot: int) -> BlockName | None:
        """Return the slot's block. None: it is not READY, or was changed during the read."""
        generation = self.generations[slot]
        if self.states[slot] != READY:
            return None
        tokens = self._token_ids[slot, : min(int(self._num_tokens[slot]), self.geometry.block_tokens)]
        salt_bytes = int(self._salt_bytes[slot])
        salt = None if salt_bytes == _NO_SALT else self._salts[slot, :salt_bytes].tobytes().decode("utf-8", "replace")
        name = BlockName(self.key(slot), BlockKey(self._parents[slot].tobytes()), tuple(tokens.tolist()), salt)
        return name if self.generations[slot] == generation else None

    def count_ready(self) -> int:
        return int(np.count_nonzero(self.states == READY))

    # ---- changing, under the lock

    @property
    def is_dirty(self) -> bool:
        return bool(self._header["dirty"][0])

    @is_dirty.setter
    def is_dirty(self, value: bool) -> None:
        self._header["dirty"] = value

    @property
    def num_fresh(self) -> int:
        return min(int(self._header["num_fresh"][0]), self.geometry.num_slots)

    def take_free(self) -> int | None:
        """Return a slot that was used before and is free, or None."""
        left = int(self._header["num_free"][0])
        if left == 0:
            return None
        self._header["num_free"] = left - 1
        return int(self._free[left - 1])

    def take_fresh(self) -> int | None:
        """Return a slot that was never used, or None."""
        fresh = self.num_fresh
        if fresh == self.geometry.num_slots:
            return None
        self._header["num_fresh"] = fresh + 1
        return fresh

    def can_hold(self, name: BlockName) -> bool:
        """Return True if the block's description fits into a slot."""
        fits = len(name.token_ids) <= self.geometry.block_tokens and len(name.key) == len(name.parent) == 16
        return fits and len((name.salt or "").encode()) <= _SALT_BYTES

    def begin(self, slot: int, name: BlockName, owner: tuple[int, int], now_ns: int) -> int:
        """Mark the slot as WRITING, and return its generation."""
        self.states[slot] = FREE
        self.generations[slot] += np.uint64(1)
        self.keys[slot] = np.frombuffer(name.key, dtype="<u8")
        self._parents[slot] = np.frombuffer(name.parent, dtype="<u8")
        self._num_tokens[slot] = len(name.token_ids)
        self._token_ids[slot, : len(name.token_ids)] = name.token_ids
        salt = (name.salt or "").encode()
        self._salt_bytes[slot] = _NO_SALT if name.salt is None else len(salt)
        self._salts[slot, : len(salt)] = np.frombuffer(salt, dtype=np.uint8)
        self.owners[slot] = owner
        self.last_use_ns[slot] = now_ns
        self.states[slot] = WRITING
        self._insert(slot)
        return int(self.generations[slot])

    def finish(self, slot: int, checksum: int, now_ns: int) -> None:
        """Mark the slot as READY."""
        self.checksums[slot] = checksum
        self.last_use_ns[slot] = now_ns
        self.states[slot] = READY

    def clear(self, slot: int) -> None:
        """Forget the slot's block. The slot then belongs to the caller, who fills it or gives it back."""
        self.states[slot] = FREE
        self.generations[slot] += np.uint64(1)
        bucket = int(self.keys[slot, 0]) & self._mask
        for _ in range(_MAX_PROBES):
            entry = int(self._buckets[bucket])
            if entry == slot + 1:
                self._buckets[bucket] = _TOMBSTONE
                self._header["num_tombstones"] += 1
                break
            if entry == _EMPTY:
                break
            bucket = (bucket + 1) & self._mask
        if int(self._header["num_tombstones"][0]) > self.geometry.num_buckets // 4:
            self._rehash()

    def give_back(self, slot: int) -> None:
        """Make the slot free."""
        left = int(self._header["num_free"][0])
        self._free[left] = slot
        self._header["num_free"] = left + 1

    def oldest(self, count: int) -> list[int]:
        """Return READY slots, least recently used first."""
        slots = np.flatnonzero(self.states == READY)
        use = self.last_use_ns[slots]
        if count < len(slots):
            part = np.argpartition(use, count)[:count]
            slots, use = slots[part], use[part]
        oldest: list[int] = slots[np.argsort(use, kind="stable")].tolist()
        return oldest

    def rebuild(self, is_alive: Callable[[int, int], bool]) -> None:
        """Rebuild buckets and free slots from the slots alone."""
        used = np.flatnonzero(self.states)
        self._header["num_fresh"] = max(self.num_fresh, int(used[-1]) + 1 if len(used) else 0)
        for slot in np.flatnonzero(self.states == WRITING).tolist():
            if not is_alive(*self.owners[slot].tolist()):
                self.states[slot] = FREE
        self.states[self.states > READY] = FREE
        # Of two slots with the same key, keep the one that was used last.
        used = np.flatnonzero(self.states)
        used = used[np.argsort(self.last_use_ns[used], kind="stable")[::-1]]
        _, firsts = np.unique(self.keys[used], axis=0, return_index=True)
        duplicates = np.delete(used, firsts)
        self.states[duplicates] = FREE
        free = np.flatnonzero(self.states[: self.num_fresh] == FREE)
        self.generations[free] += np.uint64(1)
        self._free[: len(free)] = free
        self._header["num_free"] = len(free)
        self._rehash()

    def _insert(self, slot: int) -> None:
        """Enter the slot into the hash table."""
        bucket = int(self.keys[slot, 0]) & self._mask
        for _ in range(_MAX_PROBES):
            entry = int(self._buckets[bucket])
            if entry in (_EMPTY, _TOMBSTONE):
                self._buckets[bucket] = slot + 1
                if entry == _TOMBSTONE:
                    self._header["num_tombstones"] -= 1
                return
            bucket = (bucket + 1) & self._mask
        # No bucket: the block is never found, and its slot is reused later.

    def _rehash(self) -> None:
        """Rebuild the hash table."""
        self._buckets[:] = _EMPTY
        self._header["num_tombstones"] = 0
        slots = np.flatnonzero(self.states)
        buckets = (self.keys[slots, 0] & np.uint64(self._mask)).astype(np.int64)
        for _ in range(_MAX_PROBES):
            if not len(slots):
                break
            # Of several slots for one bucket the first takes it, and the others try the next.
            _, firsts = np.unique(buckets, return_index=True)
            takes = np.zeros(len(slots), dtype=bool)
            takes[firsts] = True
            takes &= self._buckets[buckets] == _EMPTY
            self._buckets[buckets[takes]] = slots[takes] + 1
            slots, buckets = slots[~takes], (buckets[~takes] + 1) & self._mask

"""A file of fixed-size slots, mapped into memory: records that survive `kill -9` and cost a microsecond.

The kernel keeps the pages of a mapped file when the process dies, so a record needs no system call. The file is allocated in
advance, so a full disk cannot stop a write. It is not synced: after a power failure, recent changes may be missing.

A slot holds, at fixed places:

    state                        free, open or closed
    4 cells                      integers that change while the slot is open; each is written in one machine instruction
    note                         a short text, such as the worker's name
    head                         written by `open`, in one piece with the state "open"
    tail                         written by `close_slot`, before the state becomes "closed"

Head and tail have checksums, because after a power failure only some pages may have reached the disk.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from struct import Struct
from zlib import crc32

from stoker.base.errors import ConfigError

SLOT_BYTES = 1024
HEAD_BYTES = 704  # the longest head
TAIL_BYTES = 128  # the longest tail
NOTE_BYTES = 111
NUM_CELLS = 4

_FREE, _OPEN, _CLOSED = 0, 1, 2
_MAGIC = b"stoker slots 1\0\0"
_HEADER_BYTES = 4096
_IDENTITY_AT, _IDENTITY_BYTES = 64, 16
_MODE = 0o600

_WORDS_PER_SLOT = SLOT_BYTES // 8
_CELLS_AT = 8
_NOTE_AT = _CELLS_AT + 8 * NUM_CELLS  # one byte for its length, then the text
_HEAD_AT = _NOTE_AT + 1 + NOTE_BYTES
_PART = Struct("<II")  # length and checksum of a head or a tail
_PART_BYTES = _PART.size
_TAIL_AT = _HEAD_AT + _PART_BYTES + HEAD_BYTES
_OPENED = _OPEN.to_bytes(8, sys.byteorder) + bytes(_HEAD_AT - 8)  # state, empty cells and an empty note
assert _TAIL_AT + _PART_BYTES + TAIL_BYTES <= SLOT_BYTES


@dataclass(frozen=True, slots=True)
class FoundSlot:
    """A slot that an earlier process left in use."""

    index: int
    head: bytes
    tail: bytes | None  # None if the slot was open, or its tail is damaged
    cells: tuple[int, ...]
    note: str


class SlotFileInUse(ConfigError):
    """Another process holds the lock of the slot file."""


class SlotFile:
    """The slots of one process. The thread that opens slots and the one that frees them may differ."""

    def __init__(self, path: Path, num_slots: int, setting: str) -> None:
        """Open or create the file and lock it. `setting` names the setting that errors blame.

        Raises SlotFileInUse if another process holds the lock.
        """
        self.path = path
        self.num_damaged = 0
        try:
            self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, _MODE)
            os.fchmod(self._file, _MODE)
        except OSError as error:
            raise ConfigError(f"{setting}: {path} cannot be opened: {error}") from error
        try:
            self._lock(setting)
            num_slots = max(num_slots, self._slots_in_use())
            try:
                os.ftruncate(self._file, _HEADER_BYTES + num_slots * SLOT_BYTES)
                os.posix_fallocate(self._file, 0, _HEADER_BYTES + num_slots * SLOT_BYTES)
            except OSError as error:
                needed = (_HEADER_BYTES + num_slots * SLOT_BYTES) >> 20
                raise ConfigError(f"{setting}: {path} needs {needed} MiB of disk space: {error}") from error
            self._map = mmap.mmap(self._file, 0)
        except BaseException:
            os.close(self._file)
            raise
        self._map[: len(_MAGIC)] = _MAGIC
        if not any(self._map[_IDENTITY_AT : _IDENTITY_AT + _IDENTITY_BYTES]):
            self._map[_IDENTITY_AT : _IDENTITY_AT + _IDENTITY_BYTES] = os.urandom(_IDENTITY_BYTES)
        # A name of the file that no other file has. A process that is started again after a kill has its predecessor's.
        self.identity = self._map[_IDENTITY_AT : _IDENTITY_AT + _IDENTITY_BYTES].hex()
        self._words = memoryview(self._map)[_HEADER_BYTES:].cast("Q")
        self._num_slots = num_slots
        self._left_over = [index for index in range(num_slots) if self._words[index * _WORDS_PER_SLOT] != _FREE]
        in_use = set(self._left_over)
        self._free = deque(index for index in reversed(range(num_slots)) if index not in in_use)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self._num_slots - len(self._free)

    def open(self, head: bytes) -> int:
        """Take a slot and write its head. Raises IndexError if no slot is free."""
        index = self._free.pop()  # the one freed last, whose memory is warm
        at = _HEADER_BYTES + index * SLOT_BYTES
        data = _OPENED + _PART.pack(len(head), crc32(head)) + head
        self._map[at : at + len(data)] = data
        return index

    def cells(self, index: int) -> memoryview:
        """Return the slot's integers, which may be changed until the slot is freed."""
        word = index * _WORDS_PER_SLOT + 1
        return self._words[word : word + NUM_CELLS]

    def write_note(self, index: int, text: str) -> None:
        at = _HEADER_BYTES + index * SLOT_BYTES + _NOTE_AT
        note = _note(text)
        self._map[at : at + len(note)] = note

    def close_slot(self, index: int, tail: bytes) -> None:
        """Write the tail, after which the cells no longer count."""
        at = _HEADER_BYTES + index * SLOT_BYTES + _TAIL_AT
        self._map[at : at + _PART_BYTES + len(tail)] = _PART.pack(len(tail), crc32(tail)) + tail
        self._words[index * _WORDS_PER_SLOT] = _CLOSED

    def free(self, index: int) -> None:
        self._words[index * _WORDS_PER_SLOT] = _FREE
        self._free.append(index)

    def left_over(self) -> list[FoundSlot]:
        """Return the slots that an earlier process left in use. The caller must free each. Damaged ones are freed here."""
        found = []
        for index in self._left_over:
            at = _HEADER_BYTES + index * SLOT_BYTES
            state, *cells = self._words[index * _WORDS_PER_SLOT : index * _WORDS_PER_SLOT + 1 + NUM_CELLS]
            head = _read(self._map, at + _HEAD_AT, HEAD_BYTES)
            if head is None or state not in (_OPEN, _CLOSED):
                self.num_damaged += 1
                self.free(index)
                continue
            tail = _read(self._map, at + _TAIL_AT, TAIL_BYTES) if state == _CLOSED else None
            length = min(self._map[at + _NOTE_AT], NOTE_BYTES)
            note = self._map[at + _NOTE_AT + 1 : at + _NOTE_AT + 1 + length].decode("utf-8", "replace")
            found.append(FoundSlot(index, head, tail, tuple(cells), note))
        self._left_over = []
        return found

    def close(self) -> None:
        """Release the lock. What is in use stays in the file."""
        fcntl.flock(self._file, fcntl.LOCK_UN)  # the mapping keeps the file open, and with it the lock
        os.close(self._file)

    def _lock(self, setting: str) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SlotFileInUse(f"{setting}: another process uses {self.path}") from error

    def _slots_in_use(self) -> int:
        """Return how many slots the file must keep: up to the last one that is in use."""
        size = os.fstat(self._file).st_size
        if size <= _HEADER_BYTES:
            return 0
        if os.pread(self._file, len(_MAGIC), 0) != _MAGIC:
            raise ConfigError(f"{self.path} is not a slot file of this version of stoker; move it away")
        for index in range((size - _HEADER_BYTES) // SLOT_BYTES - 1, -1, -1):
            if os.pread(self._file, 8, _HEADER_BYTES + index * SLOT_BYTES) != bytes(8):
                return index + 1
        return 0


@lru_cache(maxsize=1024)
def _note(text: str) -> bytes:
    """Return a note as it is stored: one byte for its length, then the text."""
    data = text.encode("utf-8", "replace")[:NOTE_BYTES]
    return bytes((len(data),)) + data


def _read(slots: mmap.mmap, at: int, max_bytes: int) -> bytes | None:
    """Return a head or a tail, or None if it is damaged."""
    length, checksum = _PART.unpack_from(slots, at)
    if not 0 < length <= max_bytes:
        return None
    data = slots[at + _PART_BYTES : at + _PART_BYTES + length]
    return data if crc32(data) == checksum else None

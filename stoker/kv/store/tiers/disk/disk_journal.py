"""The journal in which the processes that share a disk tier's directory announce the files they add and remove."""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from stoker.kv.store.tiers.disk.disk_index import FileId

_RECORD = struct.Struct("<4sI24sQ8s")  # mark, added or removed, file, bytes, writer; a crc follows
_CRC = struct.Struct("<I")
_RECORD_BYTES = _RECORD.size + _CRC.size
_MARK = b"kv\r\n"
_ADDED, _REMOVED = 1, 2
_ROTATE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class JournalChange:
    """One file that a process added or removed."""

    file: FileId
    num_bytes: int
    is_added: bool


class DiskJournal:
    """A file to which every process appends its changes, and from which it reads those of the others.

    When the file has grown long, one process renames it, and all processes continue in a new file. Not thread-safe: the
    owner locks it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = os.urandom(8)
        self._write_fd = self._opened(os.O_WRONLY)
        self._read_fd = self._opened(os.O_RDONLY)
        self._read_offset = os.fstat(self._read_fd).st_size  # earlier changes are found by the scan

    def close(self) -> None:
        os.close(self._write_fd)
        os.close(self._read_fd)

    def append(self, changes: Iterable[JournalChange]) -> None:
        """Append changes."""
        records = b"".join(self._record(change) for change in changes)
        # one write to a file opened for appending is not mixed with writes of other processes
        os.write(self._write_fd, records)
        while not self._is_current(self._write_fd):  # processes that read the new file would not see it
            self._write_fd = self._moved(self._write_fd, os.O_WRONLY)
            os.write(self._write_fd, records)
        if os.fstat(self._write_fd).st_size > _ROTATE_BYTES:
            self._rotate()

    def read_changes(self) -> list[JournalChange]:
        """Return what other processes appended since the last call."""
        is_current = self._is_current(self._read_fd)
        changes = self._unread()
        if not is_current:
            self._read_fd = self._moved(self._read_fd, os.O_RDONLY)
            self._read_offset = 0
            changes += self._unread()
        return changes

    def _unread(self) -> list[JournalChange]:
        size = os.fstat(self._read_fd).st_size - self._read_offset
        data = os.pread(self._read_fd, size, self._read_offset) if size > 0 else b""
        changes, offset = [], 0
        while len(data) - offset >= _RECORD_BYTES:
            record, (crc,) = data[offset : offset + _RECORD.size], _CRC.unpack_from(data, offset + _RECORD.size)
            if crc != zlib.crc32(record):  # a full disk truncated a record
                offset = data.find(_MARK, offset + 1) % (len(data) + 1)
                continue
            _, kind, file, num_bytes, writer = _RECORD.unpack(record)
            if writer != self._writer:
                changes.append(JournalChange(file, num_bytes, kind == _ADDED))
            offset += _RECORD_BYTES
        self._read_offset += offset
        return changes

    def _record(self, change: JournalChange) -> bytes:
        kind = _ADDED if change.is_added else _REMOVED
        record = _RECORD.pack(_MARK, kind, change.file, change.num_bytes, self._writer)
        return record + _CRC.pack(zlib.crc32(record))

    def _rotate(self) -> None:
        """Rename the journal, so that all processes begin a new file."""
        try:
            fcntl.flock(self._write_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another process rotates it
        try:
            if self._is_current(self._write_fd):
                os.replace(self._path, self._path.with_suffix(".old"))
        finally:
            fcntl.flock(self._write_fd, fcntl.LOCK_UN)

    def _is_current(self, fd: int) -> bool:
        try:
            return os.stat(self._path).st_ino == os.fstat(fd).st_ino
        except FileNotFoundError:
            return False

    def _moved(self, old_fd: int, flags: int) -> int:
        """Open the new file and close the old one. If the new one cannot be opened, the old one stays open: a closed
        descriptor's number would soon belong to another file."""
        fd = self._opened(flags)
        os.close(old_fd)
        return fd

    def _opened(self, flags: int) -> int:
        return os.open(self._path, flags | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

"""What lies in the disk tier's directory, in the order of use, and the journal by which all processes that share it know that.

The files are the truth; this is what one process believes about them. A belief may be late or wrong (a file gone, one not known
yet): whoever acts on it finds out.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

FileId = bytes  # the folder's name (8 bytes: model, layout, format), then the block's key

FOLDER_BYTES = 8
_SUFFIX = ".kv"


def path_of(root: Path, file: FileId) -> str:
    """Two levels of 16 folders below the model's own: no folder grows too long, and few are made for a small cache."""
    key = file[FOLDER_BYTES:].hex()
    return f"{root}/{file[:FOLDER_BYTES].hex()}/{key[0]}/{key[1]}/{key}{_SUFFIX}"


@dataclass(slots=True, eq=False)
class Entry:
    num_bytes: int
    used_ns: int
    noted_ns: int  # the use that the file itself tells others and a later start of


class DiskIndex:
    """Not thread-safe: its owner locks."""

    def __init__(self) -> None:
        self._entries: dict[FileId, Entry] = {}
        self._uses: list[tuple[int, FileId]] = []  # a heap; those that are not an entry's last are skipped
        self._latest_ns = 0
        self.num_bytes = 0
        self.reserved_bytes = 0  # of blocks that are being written

    def __contains__(self, file: FileId) -> bool:
        return file in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def files(self) -> list[FileId]:
        return list(self._entries)

    def get(self, file: FileId) -> Entry | None:
        return self._entries.get(file)

    def now_ns(self) -> int:
        """Wall time, since files outlive processes and boots, but later than any use that is known: when the clock was set
        back, what is used now still counts as used last."""
        self._latest_ns = max(self._latest_ns + 1, time.time_ns())
        return self._latest_ns

    def use(self, file: FileId, num_bytes: int, used_ns: int, *, is_noted: bool) -> None:
        """It is there, and was used."""
        entry = self._entries.get(file)
        if entry is None:
            entry = self._entries[file] = Entry(num_bytes, used_ns, used_ns if is_noted else 0)
            self.num_bytes += num_bytes
        elif used_ns > entry.used_ns:
            entry.used_ns = used_ns
            entry.noted_ns = used_ns if is_noted else entry.noted_ns
        self._latest_ns = max(self._latest_ns, used_ns)
        heapq.heappush(self._uses, (entry.used_ns, file))
        if len(self._uses) > 4 * len(self._entries) + 1000:
            self._sort()

    def remove(self, file: FileId) -> bool:
        entry = self._entries.pop(file, None)
        if entry is None:
            return False
        self.num_bytes -= entry.num_bytes
        return True

    def oldest(self) -> tuple[FileId, Entry] | None:
        while self._uses:
            used_ns, file = self._uses[0]
            entry = self._entries.get(file)
            if entry is not None and entry.used_ns == used_ns:
                return file, entry
            heapq.heappop(self._uses)
        return None

    def merge(self, scanned: dict[FileId, Entry]) -> None:
        """What a scan found, besides what is known."""
        scanned |= self._entries
        self._entries = scanned
        self.num_bytes = sum(entry.num_bytes for entry in scanned.values())
        self._latest_ns = max([self._latest_ns, *(entry.used_ns for entry in scanned.values())])
        self._sort()

    def _sort(self) -> None:
        self._uses = sorted((entry.used_ns, file) for file, entry in self._entries.items())


def scan(root: Path) -> Iterator[dict[FileId, Entry]]:
    """All blocks below `root`, a folder at a time."""
    for model in _folders(root, 2 * FOLDER_BYTES):
        for first in _folders(model, 1):
            for second in _folders(first, 1):
                found = {}
                try:
                    with os.scandir(second) as entries:
                        for entry in entries:
                            file = _file_id(model.name, entry.name)
                            if file is not None and (seen := _entry(entry)) is not None:
                                found[file] = seen
                except FileNotFoundError:
                    pass  # removed by another while we looked
                yield found


def _entry(found: os.DirEntry[str]) -> Entry | None:
    """None: removed by another while we looked; the rest of its folder is still there."""
    try:
        stat = found.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return Entry(stat.st_size, stat.st_mtime_ns, stat.st_mtime_ns)


def _folders(above: Path, num_digits: int) -> Iterator[Path]:
    try:
        names = sorted(os.listdir(above))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        if len(name) == num_digits and _from_hex(name.ljust(2, "0")) is not None:
            yield above / name


def _file_id(model: str, name: str) -> FileId | None:
    key = _from_hex(name.removesuffix(_SUFFIX)) if name.endswith(_SUFFIX) and len(name) == 32 + len(_SUFFIX) else None
    return None if key is None else bytes.fromhex(model) + key


def _from_hex(digits: str) -> bytes | None:
    try:
        return bytes.fromhex(digits)
    except ValueError:
        return None


_RECORD = struct.Struct("<4sI24sQ8s")  # mark, added or removed, file, bytes, writer; a crc follows
_CRC = struct.Struct("<I")
_RECORD_BYTES = _RECORD.size + _CRC.size
_MARK = b"kv\r\n"
_ADDED, _REMOVED = 1, 2
_ROTATE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Change:
    file: FileId
    num_bytes: int
    is_added: bool


class Journal:
    """One file to which every process appends its changes and from which it reads those of the others. When it has grown long,
    somebody renames it, and whoever notices goes on in a new one. Not thread-safe: its owner locks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = os.urandom(8)
        self._write_fd = self._opened(os.O_WRONLY)
        self._read_fd = self._opened(os.O_RDONLY)
        self._at = os.fstat(self._read_fd).st_size  # what came before is found by the scan

    def close(self) -> None:
        os.close(self._write_fd)
        os.close(self._read_fd)

    def append(self, changes: Iterable[Change]) -> None:
        records = b"".join(self._record(change) for change in changes)
        os.write(self._write_fd, records)  # one write to a file opened for appending is not mixed with another's
        while not self._is_current(self._write_fd):  # those who have gone on to the new one would not see it
            self._write_fd = self._moved(self._write_fd, os.O_WRONLY)
            os.write(self._write_fd, records)
        if os.fstat(self._write_fd).st_size > _ROTATE_BYTES:
            self._rotate()

    def news(self) -> list[Change]:
        """What others appended since the last call."""
        is_current = self._is_current(self._read_fd)
        changes = self._unread()
        if not is_current:
            self._read_fd = self._moved(self._read_fd, os.O_RDONLY)
            self._at = 0
            changes += self._unread()
        return changes

    def _unread(self) -> list[Change]:
        size = os.fstat(self._read_fd).st_size - self._at
        data = os.pread(self._read_fd, size, self._at) if size > 0 else b""
        changes, at = [], 0
        while len(data) - at >= _RECORD_BYTES:
            record, (crc,) = data[at : at + _RECORD.size], _CRC.unpack_from(data, at + _RECORD.size)
            if crc != zlib.crc32(record):  # a full disk cut one short
                at = data.find(_MARK, at + 1) % (len(data) + 1)
                continue
            _, kind, file, num_bytes, writer = _RECORD.unpack(record)
            if writer != self._writer:
                changes.append(Change(file, num_bytes, kind == _ADDED))
            at += _RECORD_BYTES
        self._at += at
        return changes

    def _record(self, change: Change) -> bytes:
        kind = _ADDED if change.is_added else _REMOVED
        record = _RECORD.pack(_MARK, kind, change.file, change.num_bytes, self._writer)
        return record + _CRC.pack(zlib.crc32(record))

    def _rotate(self) -> None:
        try:
            fcntl.flock(self._write_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another does it
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
        """On to the new one. Where that cannot be opened we keep the old: its number, closed, would soon be another's."""
        fd = self._opened(flags)
        os.close(old_fd)
        return fd

    def _opened(self, flags: int) -> int:
        return os.open(self._path, flags | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

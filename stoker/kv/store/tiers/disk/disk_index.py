"""DiskIndex: which files the disk tier's directory holds, in the order of their last use, as one process knows it.

The files are the truth. An index entry may be late or wrong: a file may be gone, or not known yet. Code that acts on an
entry must handle that.
"""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FileId = bytes  # folder name (8 bytes that identify model, layout and format), then the block's key

FOLDER_BYTES = 8
_SUFFIX = ".kv"


def path_of(root: Path, file: FileId) -> str:
    """Return a file's path. There are two levels of 16 folders below the model's folder, so that no folder becomes too
    long and a small cache has few folders."""
    key = file[FOLDER_BYTES:].hex()
    return f"{root}/{file[:FOLDER_BYTES].hex()}/{key[0]}/{key[1]}/{key}{_SUFFIX}"


@dataclass(slots=True, eq=False)
class FileEntry:
    """One file of the directory."""

    num_bytes: int
    used_ns: int
    noted_ns: int  # the last use that is recorded in the file itself, for other processes and later starts


class DiskIndex:
    """The files by their last use. Not thread-safe: the owner locks it."""

    def __init__(self) -> None:
        self._entries: dict[FileId, FileEntry] = {}
        self._uses: list[tuple[int, FileId]] = []  # a heap; an item that is not its entry's last use is skipped
        self._latest_ns = 0
        self.num_bytes = 0
        self.reserved_bytes = 0  # space reserved for blocks that are being written

    def __contains__(self, file: FileId) -> bool:
        return file in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def files(self) -> list[FileId]:
        return list(self._entries)

    def get(self, file: FileId) -> FileEntry | None:
        return self._entries.get(file)

    def now_ns(self) -> int:
        """Return the wall-clock time, because files outlive processes and reboots. It is always later than any known
        use, so that a clock that was set back does not make current uses look old."""
        self._latest_ns = max(self._latest_ns + 1, time.time_ns())
        return self._latest_ns

    def use(self, file: FileId, num_bytes: int, used_ns: int, *, is_noted: bool) -> None:
        """Record that a file exists and was used. `is_noted`: the use is recorded in the file too."""
        entry = self._entries.get(file)
        if entry is None:
            entry = self._entries[file] = FileEntry(num_bytes, used_ns, used_ns if is_noted else 0)
            self.num_bytes += num_bytes
        elif used_ns > entry.used_ns:
            entry.used_ns = used_ns
            entry.noted_ns = used_ns if is_noted else entry.noted_ns
        self._latest_ns = max(self._latest_ns, used_ns)
        heapq.heappush(self._uses, (entry.used_ns, file))
        if len(self._uses) > 4 * len(self._entries) + 1000:
            self._sort()

    def remove(self, file: FileId) -> bool:
        """Remove a file. Returns False if it was not in the index."""
        entry = self._entries.pop(file, None)
        if entry is None:
            return False
        self.num_bytes -= entry.num_bytes
        return True

    def oldest(self) -> tuple[FileId, FileEntry] | None:
        """Return the least recently used file."""
        while self._uses:
            used_ns, file = self._uses[0]
            entry = self._entries.get(file)
            if entry is not None and entry.used_ns == used_ns:
                return file, entry
            heapq.heappop(self._uses)
        return None

    def merge(self, scanned: dict[FileId, FileEntry]) -> None:
        """Add the files that a scan found."""
        scanned |= self._entries
        self._entries = scanned
        self.num_bytes = sum(entry.num_bytes for entry in scanned.values())
        self._latest_ns = max([self._latest_ns, *(entry.used_ns for entry in scanned.values())])
        self._sort()

    def _sort(self) -> None:
        self._uses = sorted((entry.used_ns, file) for file, entry in self._entries.items())


def scan(root: Path) -> Iterator[dict[FileId, FileEntry]]:
    """Yield all blocks below `root`, one folder at a time."""
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
                    pass  # removed by another process meanwhile
                yield found


def _entry(found: os.DirEntry[str]) -> FileEntry | None:
    """Return the entry of a file, or None if another process has removed it meanwhile."""
    try:
        stat = found.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return FileEntry(stat.st_size, stat.st_mtime_ns, stat.st_mtime_ns)


def _folders(above: Path, num_digits: int) -> Iterator[Path]:
    """Yield the folders whose names are `num_digits` hex digits."""
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

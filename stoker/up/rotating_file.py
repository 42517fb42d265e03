"""RotatingFile: a log file with a maximum size. Older parts are NAME.1, NAME.2 and so on. Only this user can read them."""

from __future__ import annotations

import os
import stat
import threading
from contextlib import suppress
from pathlib import Path

_LONGEST_LINE_BYTES = 1 << 20  # a file is rotated in the middle of a longer line


class RotatingFile:
    """Appends to a file, from any thread. What cannot be written, on a full disk, is dropped and counted."""

    def __init__(self, path: Path, max_bytes: float, max_files: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._size = 0
        self._lost_bytes = 0
        self.problem: str | None = None  # why the last write failed

    def write(self, data: bytes) -> None:
        """Append. Never raises: a log that cannot be written must not stop the process that writes it."""
        with self._lock:
            try:
                self._open()
                if self._lost_bytes:  # it begins with a newline, because the last line may have been written in part
                    self._append(b'\n{"part":"up","event":"log_bytes_lost","bytes":%d}\n' % self._lost_bytes)
                    self._lost_bytes = 0
                self._append(self._rotate(data) if self._size >= self._max_bytes else data)
                self.problem = None
            except OSError as error:
                self.problem = f"{self._path}: {error.strerror}"
                self._lost_bytes += len(data)  # at most: a part of it may have been written
                self._close()

    def close(self) -> None:
        with self._lock:
            self._close()

    def _append(self, data: bytes) -> None:
        assert self._fd is not None
        while data:
            count = os.write(self._fd, data)
            self._size += count
            data = data[count:]

    def _open(self) -> None:
        """Open the file, also if it was removed or renamed meanwhile."""
        if self._fd is not None:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._fd), os.stat(self._path)):
                    return
            self._close()
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        state = os.fstat(self._fd)
        self._size = state.st_size
        if stat.S_ISREG(state.st_mode):
            os.fchmod(self._fd, 0o600)  # an earlier version may have created it for all users

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _rotate(self, data: bytes) -> bytes:
        """Finish the current line, and begin a new file. Return the data that is left for it."""
        end = data.find(b"\n") + 1
        if not end and self._size < self._max_bytes + _LONGEST_LINE_BYTES:
            return data
        self._append(data[:end])
        for number in range(self._max_files - 1, 0, -1):
            older = self._numbered(number - 1)
            if older.exists():
                older.replace(self._numbered(number))
        if self._max_files == 1:
            self._path.unlink(missing_ok=True)
        self._open()
        return data[end:]

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}") if number else self._path

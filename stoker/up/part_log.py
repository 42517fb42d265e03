"""PartLog: what one process writes to stderr. A thread reads it from a pipe and writes it to the part's log file.

So the file can be rotated while the process runs, and no line is lost. The thread reads on when the disk is full. The processes of
Stoker do not wait for a full pipe (`base/log_output.py`), so they also continue while `stoker up` is suspended.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile

from stoker.up.rotating_file import RotatingFile

_PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_TAIL_BYTES = 1 << 16


class PartLog:
    """The log of one process, from its start to its exit. The newest bytes are kept for the terminal."""

    def __init__(self, file: RotatingFile) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._tail = b""
        self._num_new = 0  # how many bytes of the tail `new_lines` has not returned
        self._read_fd, self.write_fd = os.pipe()
        with suppress(OSError, AttributeError):  # a limit of the system, or not Linux: the default size will do
            fcntl.fcntl(self._read_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._thread = threading.Thread(target=self._run, name="part-log", daemon=True)

    @contextmanager
    def writer(self) -> Iterator[None]:
        """Start the process in this block, with `write_fd` as its stderr."""
        self._file.write(b"")  # the file exists from the start
        self._thread.start()
        try:
            yield
        finally:
            os.close(self.write_fd)  # the process has its own copy; the log ends when that one is closed

    def finish(self, timeout_s: float) -> None:
        """Wait until everything that was written is in the file."""
        self._thread.join(timeout_s)

    def new_lines(self) -> list[str]:
        """Return the complete progress lines since the last call.

        JSON events are left out. So are tracebacks, which are shown when the process has exited.
        """
        with self._lock:
            text, newline, rest = self._tail[len(self._tail) - self._num_new :].rpartition(b"\n")
            if newline:
                self._num_new = len(rest)
        words = takewhile(lambda line: not line.startswith("Traceback"), text.decode(errors="replace").splitlines())
        return [line for line in words if line.strip() and not line.startswith(("{", " "))]

    def last_lines(self, num_lines: int) -> list[str]:
        with self._lock:
            return self._tail.decode(errors="replace").splitlines()[-num_lines:]

    def _run(self) -> None:
        while data := os.read(self._read_fd, _READ_BYTES):
            self._file.write(data)
            with self._lock:
                self._tail = (self._tail + data)[-_TAIL_BYTES:]
                self._num_new = min(self._num_new + len(data), len(self._tail))
        os.close(self._read_fd)

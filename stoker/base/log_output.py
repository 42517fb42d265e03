"""Writes log lines to stderr. A pipe that is not read, a full disk or a closed stderr costs lines; it never delays the process."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterable, Iterator

from stoker.base.log_lines import MAX_LINE_BYTES


class LogOutput:
    """Writes complete lines of at most MAX_LINE_BYTES to a file descriptor, from any thread."""

    def __init__(self, fd: int = 2) -> None:
        self._fd = _without_waiting(fd)
        self._lock = threading.Lock()
        self._torn = False  # the last line was written in part
        self._dropped = 0

    def write(self, line: bytes) -> bool:
        """Return False if the line was dropped."""
        with self._lock:
            data = b"\n" + line if self._torn else line
            try:
                while data:
                    count = os.write(self._fd, data)
                    data = data[count:]
                    self._torn = bool(data)
            except OSError:
                self._dropped += 1
                return False
            return True

    def take_dropped(self) -> int:
        """Return how many lines were dropped since the last call."""
        with self._lock:
            dropped, self._dropped = self._dropped, 0
            return dropped


def _without_waiting(fd: int) -> int:
    """Return a descriptor of the same pipe that does not wait for its reader. Files and terminals are used as they are.

    Other processes have the same pipe, so its own flags must stay as they are. The pipe is therefore opened a second time.
    """
    try:
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # stderr is closed, or there is no /proc
        pass
    return fd


def line_groups(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Join lines into groups of at most MAX_LINE_BYTES, which are not mixed with other processes' lines in a pipe."""
    group: list[bytes] = []
    num_bytes = 0
    for line in lines:
        if num_bytes + len(line) > MAX_LINE_BYTES and group:
            yield b"".join(group)
            group, num_bytes = [], 0
        group.append(line)
        num_bytes += len(line)
    if group:
        yield b"".join(group)

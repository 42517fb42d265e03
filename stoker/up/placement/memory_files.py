"""MemoryFiles: files that are only in memory, for the process that a PartActor starts.

A secret must not stay on the disk of a node that is lost. The kernel frees the files when the actor ends. Their paths go through
the actor's file descriptors, which only processes of the same user can open, also those that the part's process starts.
"""

from __future__ import annotations

import os


class MemoryFiles:
    """Files by name, until `close`."""

    def __init__(self) -> None:
        self._fds: dict[str, int] = {}

    def create(self, name: str, content: bytes) -> str:
        """Create a file, and return its path."""
        fd = self._fds[name] = os.memfd_create("stoker")
        os.fchmod(fd, 0o600)
        _write(fd, content)
        return f"/proc/{os.getpid()}/fd/{fd}"

    def write(self, name: str, content: bytes) -> None:
        """Replace the content of a text file. It never gets shorter, and ends with empty lines instead. So one call is enough, and
        a reader sees the old or the new lines."""
        fd = self._fds[name]
        _write(fd, content.ljust(os.fstat(fd).st_size, b"\n"))

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def _write(fd: int, content: bytes) -> None:
    written = 0
    while written < len(content):
        written += os.pwrite(fd, content[written:], written)

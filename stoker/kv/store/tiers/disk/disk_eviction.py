"""DiskEviction: frees space in the disk tier's directory, least recently used files first, over all models and
processes."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stoker.base.log import EventLog
from stoker.kv.blocks.transfer import TierUnavailable
from stoker.kv.store.tiers.disk.disk_contents import DiskContents
from stoker.kv.store.tiers.disk.disk_directory import DiskHealth
from stoker.kv.store.tiers.disk.disk_index import FileEntry, FileId, path_of

log = EventLog("kv.disk")

_LOCK_S = 2.0


class DiskEviction:
    """Reserves space for new blocks, and evicts files when the capacity is reached."""

    def __init__(
        self, root: Path, capacity_bytes: int, file_bytes: int, contents: DiskContents, health: DiskHealth
    ) -> None:
        self._root = root
        self._health = health
        self._capacity_bytes = capacity_bytes
        self._file_bytes = file_bytes
        self._contents = contents
        self._lock = threading.Lock()
        self._fd = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._closed = False
        self.num_evicted = 0

    def reserve(self, num_blocks: int, keep: set[FileId]) -> int:
        """Reserve space for `num_blocks` blocks, and return for how many. It is fewer if only blocks of `keep` are left
        to evict. The caller gives the reservation back."""
        if self._reserve_free(num_blocks):
            return num_blocks
        removed: list[FileId] = []
        try:
            with self._evicting():
                self._contents.catch_up(force=True)
                while not self._reserve_free(num_blocks):
                    with self._contents.index() as index:
                        oldest = index.oldest()
                    if oldest is None or oldest[0] in keep:
                        num_blocks = max(0, num_blocks - 1)
                        if num_blocks == 0:
                            break
                    elif self._evict(*oldest):
                        removed.append(oldest[0])
                        self.num_evicted += 1
        except OSError as error:
            self._health.failed("evict", error)
            num_blocks = 0
        except TierUnavailable as error:
            log.warning("disk_eviction_failed", reason=error.message)
            num_blocks = 0
        self._contents.announce_lost(removed)
        return num_blocks

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._fd)

    def _reserve_free(self, num_blocks: int) -> bool:
        """Reserve space without evicting. Returns False if there is not enough."""
        size = num_blocks * self._file_bytes
        with self._contents.index() as index:
            fits = index.num_bytes + index.reserved_bytes + size <= self._capacity_bytes
            if fits:
                index.reserved_bytes += size
            return fits

    def _evict(self, file: FileId, entry: FileEntry) -> bool:
        """Delete one file. Returns False if another worker has used it since we looked."""
        path = path_of(self._root, file)
        with suppress(FileNotFoundError):  # a process that was killed while it evicted has not announced it
            used_ns = os.stat(path).st_mtime_ns
            if used_ns > entry.used_ns:
                with self._contents.index() as index:
                    index.use(file, entry.num_bytes, used_ns, is_noted=True)
                return False
            os.unlink(path)
        with self._contents.index() as index:
            index.remove(file)
        return True

    @contextmanager
    def _evicting(self) -> Iterator[None]:
        """Hold the eviction lock, which is shared by all threads and processes. The kernel releases it if its holder
        dies."""
        with self._lock:
            if self._closed:
                raise TierUnavailable("the disk tier is closed")
            until_s = time.monotonic() + _LOCK_S
            while True:
                try:
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until_s:
                        raise TierUnavailable(f"another process has been evicting for {_LOCK_S:g} s") from None
                    time.sleep(0.001)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

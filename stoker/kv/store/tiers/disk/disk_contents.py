"""DiskContents: what this process knows about the disk tier's directory.

It combines the scan at the start, this process's own writes and removals, and the journal entries of other processes. A
start does not wait for the scan. Until the scan is done, a key that is not in the index is looked up as a file.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stoker.base.log import EventLog
from stoker.kv.store.tiers.disk.disk_directory import DiskHealth
from stoker.kv.store.tiers.disk.disk_index import DiskIndex, FileEntry, FileId, path_of, scan
from stoker.kv.store.tiers.disk.disk_journal import DiskJournal, JournalChange

log = EventLog("kv.disk")

_GIB = 1 << 30
_CATCH_UP_S = 0.005  # how late changes by other processes may be noticed
_SCAN_LOG_S = 5.0


class DiskContents:
    """The index, the journal and the scan. `on_lost` receives files that this process knew and that any process has
    removed."""

    def __init__(self, root: Path, health: DiskHealth, on_lost: Callable[[Sequence[FileId]], None]) -> None:
        self._root = root
        self._health = health
        self._on_lost = on_lost
        self._index = DiskIndex()
        self._index_lock = threading.Lock()  # never held during disk I/O
        self._journal = DiskJournal(root / "journal")
        self._journal_lock = threading.Lock()
        self._caught_up_s = 0.0
        self._closed = False
        self.scanned = threading.Event()
        self._scanner: threading.Thread | None = None

    @contextmanager
    def index(self) -> Iterator[DiskIndex]:
        """Lock the index. No disk I/O may be done meanwhile."""
        with self._index_lock:
            yield self._index

    def begin_scan(self, then: Callable[[], object]) -> None:
        """Scan the directory on a thread, then call `then`."""
        self._scanner = threading.Thread(target=self._scan, args=(then,), name="kv-disk-scan", daemon=True)
        self._scanner.start()

    def wait_for_scan(self) -> None:
        """Wait until the scan has ended or failed."""
        if self._scanner is not None:
            self._scanner.join()

    def close(self) -> None:
        self._closed = True
        self.wait_for_scan()
        with self._journal_lock:
            self._journal.close()

    def exist(self, files: Sequence[FileId]) -> list[bool]:
        """Return which files exist."""
        is_whole = self.scanned.is_set()
        self.catch_up()
        with self.index() as index:
            here = [file in index for file in files]
        if is_whole:
            return here
        return [is_here or os.path.exists(path_of(self._root, file)) for is_here, file in zip(here, files, strict=True)]

    def catch_up(self, force: bool = False) -> None:
        """Apply the changes of other processes. Without `force`, do nothing if that was done a moment ago or another
        thread is doing it."""
        now_s = time.monotonic()
        if not force and now_s - self._caught_up_s < _CATCH_UP_S:
            return
        if not self._journal_lock.acquire(blocking=force):
            return
        try:
            self._caught_up_s = now_s
            changes = [] if self._closed else self._journal.read_changes()
        except OSError as error:
            self._health.failed("journal", error)
            return
        finally:
            self._journal_lock.release()
        # A block that one process removed may have been written again by another before either change was read here.
        gone = {
            change.file
            for change in changes
            if not change.is_added and not os.path.exists(path_of(self._root, change.file))
        }
        with self.index() as index:
            for change in changes:
                if change.is_added and change.file not in index and change.file not in gone:
                    index.use(change.file, change.num_bytes, index.now_ns(), is_noted=True)
            lost = [file for file in gone if index.remove(file)]
        self._on_lost(lost)

    def announce_added(self, files: Sequence[FileId], num_bytes: int) -> None:
        """Report written files to the other processes."""
        self._announce([JournalChange(file, num_bytes, True) for file in files])

    def announce_removed(self, files: Sequence[FileId]) -> None:
        """Report removed files to the other processes."""
        self._announce([JournalChange(file, 0, False) for file in files])

    def announce_lost(self, files: Sequence[FileId]) -> None:
        """Report removed files to the other processes and to this process's listener."""
        self.announce_removed(files)
        self._on_lost(files)

    def _announce(self, changes: Sequence[JournalChange]) -> None:
        if not changes:
            return
        try:
            with self._journal_lock:
                if not self._closed:
                    self._journal.append(changes)
        except OSError as error:
            self._health.failed("journal", error)

    def _scan(self, then: Callable[[], object]) -> None:
        found: dict[FileId, FileEntry] = {}
        started_s = logged_s = time.monotonic()
        try:
            for files in scan(self._root):
                found |= files
                if self._closed:
                    return
                if time.monotonic() - logged_s > _SCAN_LOG_S:
                    logged_s = time.monotonic()
                    log.event(
                        "disk_scan", path=str(self._root), blocks=len(found), elapsed_s=round(logged_s - started_s, 1)
                    )
        except OSError as error:  # keys are still looked up as files, one by one
            self._health.failed("scan", error)
            return
        with self.index() as index:
            index.merge(found)
            blocks, used = len(index), index.num_bytes
        self.scanned.set()
        log.event("disk_scanned", path=str(self._root), blocks=blocks, gib=round(used / _GIB, 3))
        then()

"""The disk tier: a file for each block, in a directory that several workers of a machine may share and that outlives them.

A start does not wait for what is there: a thread looks through the directory, and until it is done a key that is not known yet is
looked for by its name. Room is made by whoever needs it, least recently used first, over all models and processes together. A disk
that is full declines; one that fails again and again is left alone for a while.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import Enum, auto
from errno import EDQUOT, ENOSPC
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import ClassVar

from stoker.base.config import StoreSettings
from stoker.base.errors import ConfigError
from stoker.base.ids import BlockKey
from stoker.base.log import EventLog
from stoker.kv.crew import Crew
from stoker.kv.tiers.contract import TIERS, HostBytes, Tier, TierContext, TierStats
from stoker.kv.tiers.disk_crypt import Cipher, read_key
from stoker.kv.tiers.disk_dir import Pause, check_marker, remove_left_behind
from stoker.kv.tiers.disk_file import VERSION, BlockFiles, WrongBlock
from stoker.kv.tiers.disk_index import FOLDER_BYTES, Change, DiskIndex, Entry, FileId, Journal, path_of, scan
from stoker.kv.tiers.names import parents_first
from stoker.kv.tiers.processes import started_at
from stoker.kv.transfer import BlockName, TierUnavailable

log = EventLog("kv.disk")

THREADS = 4
DIRECT_BYTES = 64 << 10
_GIB = 1 << 30
_NEWS_S = 0.005  # how late others' changes may be known
_NOTE_USE_NS = 10_000_000_000  # a use is written to the file if the last one noted there is older
_LOCK_S = 2.0
_SCAN_S = 30.0
_TELL_S = 5.0
_ERRORS_IN_A_ROW = 3


@TIERS.register("disk")
def disk_tier(settings: StoreSettings, context: TierContext) -> Tier | None:
    if settings.disk_dir is None:
        return None
    cipher = Cipher(read_key(Path(settings.disk_key_file))) if settings.disk_key_file else None
    # Below a host tier the kernel's cache would only hold the same blocks a second time, and without it reads of what is not
    # cached are up to twice as fast (bench/kv_tiers.py). With no host tier it is the only RAM that the blocks have.
    return DiskTier(
        Path(settings.disk_dir),
        int(settings.disk_gib * _GIB),
        context,
        cipher,
        direct_reads=settings.host_gib > 0,
    )


class _Read(Enum):
    OK = auto()
    MISSING = auto()
    WRONG = auto()
    FAILED = auto()


class DiskTier:
    medium: ClassVar[str] = "DISK"
    shared = True

    def __init__(
        self,
        root: Path,
        capacity_bytes: int,
        context: TierContext,
        cipher: Cipher | None = None,
        *,
        direct_reads: bool = True,
    ) -> None:
        layout = context.layout
        is_large = layout.block_bytes >= DIRECT_BYTES  # a smaller one is mostly the cost of the call, cached or not
        self._writes = BlockFiles(layout.block_bytes, layout.block_tokens, cipher, direct=is_large)
        self._reads = BlockFiles(layout.block_bytes, layout.block_tokens, cipher, direct=is_large and direct_reads)
        self._file_bytes = self._writes.file_bytes
        if capacity_bytes < self._file_bytes:
            raise ConfigError(f"store.disk_gib={capacity_bytes / _GIB:g} holds no block of {self._file_bytes} bytes")
        self._root = root
        self._tmp = root / "tmp"
        self._capacity_bytes = capacity_bytes
        self._on_evicted = context.on_evicted
        self._folder = sha256(f"{VERSION} {layout.fingerprint} {context.fingerprint}".encode()).digest()[:FOLDER_BYTES]
        self._lock = threading.Lock()  # of what follows; never held while the disk is asked
        self._index = DiskIndex()
        self._pending_bytes = 0  # of blocks that are being written
        self._stats = TierStats(capacity_bytes=capacity_bytes)
        self._full, self._resting = Pause(), Pause()
        self._errors_in_a_row = 0
        self._closed = False
        self._journal_lock, self._evict_lock = threading.Lock(), threading.Lock()
        self._news_at_s = 0.0
        try:
            self._tmp.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_marker(root, cipher)
            remove_left_behind(self._tmp)
            self._journal = Journal(root / "journal")
            self._evict_fd = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as failed:
            raise ConfigError(f"store.disk_dir={root}: {failed.strerror}") from failed
        self._tmp_prefix = f"{os.getpid()}-{started_at(os.getpid())}-{os.urandom(4).hex()}"
        self._tmp_numbers = count()
        self._crew = Crew(THREADS, "kv-disk")
        self._scanned = threading.Event()
        self._scanner = threading.Thread(target=self._scan, name="kv-disk-scan", daemon=True)
        self._scanner.start()

    def find(self, keys: Sequence[BlockKey]) -> list[bool]:
        if self._resting.left_s:
            return [False] * len(keys)
        return self._here([self._folder + key for key in keys])

    def read(self, keys: Sequence[BlockKey], into: Sequence[HostBytes]) -> list[bool]:
        self._check_usable()
        files = [self._folder + key for key in keys]
        wanted = [at for at, is_here in enumerate(self._here(files)) if is_here]
        with self._lock:
            # The first count as used last: without a chain's beginning its rest is of no use.
            now_ns = self._index.now_ns()
            known = {at: self._index.get(files[at]) for at in wanted}
        to_note = {at for at, entry in known.items() if entry is None or now_ns - entry.noted_ns >= _NOTE_USE_NS}

        def read_one(at: int) -> _Read:
            return self._read_one(files[at], into[at], now_ns - at if at in to_note else None)

        results = self._crew.each(read_one, wanted)
        done = [False] * len(keys)
        lost = []
        with self._lock:
            for at, result in zip(wanted, results, strict=True):
                if result is _Read.OK:
                    done[at] = True
                    self._index.use(files[at], self._file_bytes, now_ns - at, is_noted=at in to_note)
                elif result is not _Read.FAILED:
                    self._stats.corrupt += result is _Read.WRONG
                    self._index.remove(files[at])
                    lost.append(files[at])
        self._lost(lost)
        if wanted and not any(done):
            self._check_usable()
        return done

    def write(self, names: Sequence[BlockName], data: Sequence[HostBytes]) -> list[bool]:
        if self._closed or self._resting.left_s or self._full.left_s:
            return [False] * len(names)
        blocks = {self._folder + name.key: (name, block) for name, block in zip(names, data, strict=True)}
        files = list(blocks)
        # Looked at, not believed: a process that was killed while it evicted has told nobody.
        here = {file: os.path.exists(path_of(self._root, file)) for file in files}
        wanted = [file for file in files if not here[file] and self._writes.can_hold(blocks[file][0])]
        with self._lock:
            now_ns = self._index.now_ns()
            for at, file in enumerate(files):
                if here[file]:
                    self._index.use(file, self._file_bytes, now_ns - at, is_noted=False)
                else:
                    self._index.remove(file)
        wanted = wanted[: self._make_room(len(wanted), keep=set(files))]

        def write_one(at: int) -> bool:
            return self._write_one(wanted[at], *blocks[wanted[at]], now_ns - at)

        try:
            here |= dict(zip(wanted, self._crew.each(write_one, range(len(wanted))), strict=True))
        finally:
            with self._lock:
                self._pending_bytes -= len(wanted) * self._file_bytes
                for at, file in enumerate(wanted):
                    if here[file]:
                        self._index.use(file, self._file_bytes, now_ns - at, is_noted=True)
        self._tell([Change(file, self._file_bytes, True) for file in wanted if here[file]])
        return [here[self._folder + name.key] for name in names]

    def drop(self, keys: Sequence[BlockKey]) -> None:
        files = [self._folder + key for key in keys]
        gone = [file for file in files if self._unlink(file)]
        with self._lock:
            for file in files:
                self._index.remove(file)
        self._tell([Change(file, self._file_bytes, False) for file in gone])

    def names(self) -> Iterator[BlockName]:
        """Reads a page of every file. Right after the start it waits for the scan."""
        self._scanned.wait(_SCAN_S)
        with self._lock:
            files = [file for file in self._index.files() if file[:FOLDER_BYTES] == self._folder]
        names = []
        for file in files:
            # A wrong one is found again, and dropped, when it is read.
            with suppress(OSError, WrongBlock):
                names.append(self._reads.read_name(path_of(self._root, file), BlockKey(file[FOLDER_BYTES:])))
        return parents_first(names)

    def stats(self) -> TierStats:
        with self._lock:
            return replace(self._stats, blocks=len(self._index), used_bytes=self._index.num_bytes)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._crew.close()
        self._scanner.join()
        with self._journal_lock, self._evict_lock:
            self._journal.close()
            os.close(self._evict_fd)

    # One block. The disk is asked here, by several threads at a time.

    def _read_one(self, file: FileId, into: HostBytes, use_ns: int | None) -> _Read:
        path = path_of(self._root, file)
        if self._closed or self._resting.left_s:
            return _Read.FAILED
        try:
            self._reads.read(path, BlockKey(file[FOLDER_BYTES:]), into, use_ns)
        except FileNotFoundError:
            return _Read.MISSING
        except WrongBlock as wrong:
            log.warning("disk_block_corrupt", path=path, reason=str(wrong))
            self._unlink(file)
            return _Read.WRONG
        except OSError as failed:
            self._failed("read", failed)
            return _Read.FAILED
        self._worked()
        return _Read.OK

    def _write_one(self, file: FileId, name: BlockName, data: HostBytes, use_ns: int) -> bool:
        if self._closed or self._resting.left_s or self._full.left_s:
            return False
        tmp = f"{self._tmp}/{self._tmp_prefix}-{next(self._tmp_numbers)}"
        path = path_of(self._root, file)
        try:
            try:
                self._writes.write(tmp, name, data, use_ns)
                os.rename(tmp, path)
            except FileNotFoundError:  # the first block of its folder, or somebody emptied the directory
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                self._tmp.mkdir(mode=0o700, exist_ok=True)
                if not os.path.exists(tmp):
                    self._writes.write(tmp, name, data, use_ns)
                os.rename(tmp, path)
        except OSError as failed:
            with suppress(OSError):
                os.unlink(tmp)
            self._failed("write", failed)
            return False
        self._worked(has_room=True)
        return True

    def _unlink(self, file: FileId) -> bool:
        try:
            os.unlink(path_of(self._root, file))
        except FileNotFoundError:
            return False
        except OSError as failed:
            self._failed("unlink", failed)
            return False
        return True

    def _failed(self, what: str, error: OSError) -> None:
        with self._lock:
            self._stats.errors += 1
            if error.errno in (ENOSPC, EDQUOT):
                if not self._full.left_s:
                    log.warning("disk_full", what=what, pause_s=self._full.begin(), path=str(self._root))
                return
            self._errors_in_a_row += 1
            is_hopeless = self._errors_in_a_row >= _ERRORS_IN_A_ROW and not self._resting.left_s
            pause_s = self._resting.begin() if is_hopeless else 0.0
        log.warning("disk_error", what=what, error=error.strerror, in_a_row=self._errors_in_a_row, pause_s=pause_s)

    def _worked(self, has_room: bool = False) -> None:
        with self._lock:
            self._errors_in_a_row = 0
            self._resting.end()
            if has_room:
                self._full.end()

    def _check_usable(self) -> None:
        if self._closed:
            raise TierUnavailable("the disk tier is closed")
        if left_s := self._resting.left_s:
            raise TierUnavailable(f"{self._root} failed {_ERRORS_IN_A_ROW} times in a row; it rests for {left_s:.1f} s")

    # What is there: our own knowledge, and what others tell.

    def _here(self, files: Sequence[FileId]) -> list[bool]:
        is_whole = self._scanned.is_set()
        self._catch_up()
        with self._lock:
            here = [file in self._index for file in files]
        if is_whole:
            return here
        return [is_here or os.path.exists(path_of(self._root, file)) for is_here, file in zip(here, files, strict=True)]

    def _catch_up(self, at_once: bool = False) -> None:
        now_s = time.monotonic()
        if not at_once and now_s - self._news_at_s < _NEWS_S:
            return
        if not self._journal_lock.acquire(blocking=at_once):
            return
        try:
            self._news_at_s = now_s
            changes = [] if self._closed else self._journal.news()
        except OSError as failed:
            self._failed("journal", failed)
            return
        finally:
            self._journal_lock.release()
        # A block that one process removed may have been written again by another before we heard of either.
        gone = {
            change.file
            for change in changes
            if not change.is_added and not os.path.exists(path_of(self._root, change.file))
        }
        lost = []
        with self._lock:
            for change in changes:
                if change.is_added and change.file not in self._index and change.file not in gone:
                    self._index.use(change.file, change.num_bytes, self._index.now_ns(), is_noted=True)
            for file in gone:
                if self._index.remove(file):
                    lost.append(file)
        self._report(lost)

    def _tell(self, changes: Sequence[Change]) -> None:
        if not changes:
            return
        try:
            with self._journal_lock:
                if not self._closed:
                    self._journal.append(changes)
        except OSError as failed:
            self._failed("journal", failed)

    def _lost(self, files: Sequence[FileId]) -> None:
        self._tell([Change(file, self._file_bytes, False) for file in files])
        self._report(files)

    def _report(self, files: Sequence[FileId]) -> None:
        keys = [BlockKey(file[FOLDER_BYTES:]) for file in files if file[:FOLDER_BYTES] == self._folder]
        if keys:
            self._on_evicted(keys)

    def _scan(self) -> None:
        found: dict[FileId, Entry] = {}
        began_s = told_s = time.monotonic()
        try:
            for some in scan(self._root):
                found |= some
                if self._closed:
                    return
                if time.monotonic() - told_s > _TELL_S:
                    told_s = time.monotonic()
                    log.event(
                        "disk_scan", path=str(self._root), blocks=len(found), elapsed_s=round(told_s - began_s, 1)
                    )
        except OSError as failed:  # keys stay to be looked for one by one
            self._failed("scan", failed)
            return
        with self._lock:
            self._index.merge(found)
            blocks, used = len(self._index), self._index.num_bytes
        self._scanned.set()
        log.event(
            "disk_scanned", path=str(self._root), blocks=blocks, gib=round(used / _GIB, 3), direct=self._reads.direct
        )
        self._make_room(0, keep=set())

    # Room.

    def _make_room(self, num_blocks: int, keep: set[FileId]) -> int:
        """Room for so many blocks is reserved; fewer, if only blocks of `keep` would be left. The caller returns it."""
        if self._reserve(num_blocks):
            return num_blocks
        removed: list[FileId] = []
        try:
            with self._evicting():
                self._catch_up(at_once=True)
                while not self._reserve(num_blocks):
                    with self._lock:
                        oldest = self._index.oldest()
                    if oldest is None or oldest[0] in keep:
                        num_blocks = max(0, num_blocks - 1)
                        if num_blocks == 0:
                            break
                    elif self._evict(*oldest):
                        removed.append(oldest[0])
        except (TierUnavailable, OSError) as failed:
            log.warning("disk_eviction_failed", reason=str(failed))
            num_blocks = 0
        with self._lock:
            self._stats.evicted += len(removed)
        self._lost(removed)
        return num_blocks

    def _reserve(self, num_blocks: int) -> bool:
        size = num_blocks * self._file_bytes
        with self._lock:
            fits = self._index.num_bytes + self._pending_bytes + size <= self._capacity_bytes
            if fits:
                self._pending_bytes += size
            return fits

    def _evict(self, file: FileId, entry: Entry) -> bool:
        """False: it is gone already, or another worker used it since we looked."""
        path = path_of(self._root, file)
        try:
            used_ns = os.stat(path).st_mtime_ns
            if used_ns > entry.used_ns:
                with self._lock:
                    self._index.use(file, entry.num_bytes, used_ns, is_noted=True)
                return False
            os.unlink(path)
        except FileNotFoundError:
            with self._lock:
                self._index.remove(file)
            self._report([file])
            return False
        with self._lock:
            self._index.remove(file)
        return True

    @contextmanager
    def _evicting(self) -> Iterator[None]:
        """One at a time, over all threads and processes; the kernel ends it with its holder."""
        with self._evict_lock:
            if self._closed:
                raise TierUnavailable("the disk tier is closed")
            until_s = time.monotonic() + _LOCK_S
            while True:
                try:
                    fcntl.flock(self._evict_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until_s:
                        raise TierUnavailable(f"another process has been evicting for {_LOCK_S:g} s") from None
                    time.sleep(0.001)
            try:
                yield
            finally:
                fcntl.flock(self._evict_fd, fcntl.LOCK_UN)

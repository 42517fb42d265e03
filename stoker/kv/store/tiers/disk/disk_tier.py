"""The disk tier: one file per block, in a directory that several workers of a machine may share and that outlives them.

disk_contents.py    what the directory holds
disk_journal.py     changes, announced between processes
disk_eviction.py    space in the directory
block_file.py       the format of a file
disk_directory.py   errors and pauses of the disk
disk_lookups.py     calls that may hang
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import Enum, auto
from hashlib import sha256
from itertools import count
from pathlib import Path
from socket import gethostname
from typing import ClassVar

from stoker.base.config import StoreSettings
from stoker.base.errors import ConfigError
from stoker.base.ids import BlockKey
from stoker.base.log import EventLog
from stoker.kv.blocks.transfer import BlockName, TierUnavailable
from stoker.kv.device.helper_threads import HelperThreads
from stoker.kv.store.tiers.disk.block_file import VERSION, BlockFiles, CorruptBlock
from stoker.kv.store.tiers.disk.disk_contents import DiskContents
from stoker.kv.store.tiers.disk.disk_directory import DiskHealth, check_marker, remove_abandoned_files
from stoker.kv.store.tiers.disk.disk_encryption import Cipher, read_key
from stoker.kv.store.tiers.disk.disk_eviction import DiskEviction
from stoker.kv.store.tiers.disk.disk_index import FOLDER_BYTES, FileId, path_of
from stoker.kv.store.tiers.disk.disk_lookups import DiskLookups
from stoker.kv.store.tiers.name_order import parents_first
from stoker.kv.store.tiers.process_liveness import started_at
from stoker.kv.store.tiers.tier import HostBytes, Tier, TierContext, TierStats, register_tier

log = EventLog("kv.disk")

THREADS = 4
DIRECT_BYTES = 64 << 10
_GIB = 1 << 30
_NOTE_USE_NS = 10_000_000_000  # a use is recorded in the file if the last recorded one is older
_LOOKUP_S = 1.0  # how long a lookup may take; by then most prompts are computed


@register_tier("disk", distance=200)
def disk_tier(settings: StoreSettings, context: TierContext) -> Tier | None:
    if settings.disk_dir is None:
        return None
    cipher = Cipher(read_key(Path(settings.disk_key_file))) if settings.disk_key_file else None
    # Below a host tier the kernel's page cache would hold the same blocks a second time, and direct reads of uncached
    # blocks are up to twice as fast. Without a host tier, the page cache is the only RAM that holds the blocks.
    return DiskTier(
        Path(settings.disk_dir),
        int(settings.disk_gib * _GIB),
        context,
        cipher,
        direct_reads=settings.host_gib > 0,
    )


class _ReadOutcome(Enum):
    """The result of reading one file."""

    OK = auto()
    MISSING = auto()
    WRONG = auto()
    FAILED = auto()


class DiskTier:
    """A tier of files. See the contract in tier.py."""

    medium: ClassVar[str] = "DISK"

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
        is_large = layout.block_bytes >= DIRECT_BYTES  # for a smaller block the system call costs more than the copy
        self._writes = BlockFiles(layout.block_bytes, layout.block_tokens, cipher, direct=is_large)
        self._reads = BlockFiles(layout.block_bytes, layout.block_tokens, cipher, direct=is_large and direct_reads)
        self._file_bytes = self._writes.file_bytes
        if capacity_bytes < self._file_bytes:
            raise ConfigError(
                f"store.disk_gib={capacity_bytes / _GIB:g} is smaller than one block of {self._file_bytes} bytes; raise it"
            )
        self._root = root
        self.shared_location: str | None = f"{gethostname()}:{os.path.realpath(root)}"
        self._tmp = root / "tmp"
        self._capacity_bytes = capacity_bytes
        self._on_evicted = context.on_evicted
        self._folder = sha256(f"{VERSION} {layout.fingerprint} {context.fingerprint}".encode()).digest()[:FOLDER_BYTES]
        self._health = DiskHealth(root)
        self._num_corrupt = 0
        self._closed = False
        try:
            self._tmp.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_marker(root, cipher)
            remove_abandoned_files(self._tmp)
            self._contents = DiskContents(root, self._health, self._report)
            self._eviction = DiskEviction(root, capacity_bytes, self._file_bytes, self._contents, self._health)
        except OSError as error:
            raise ConfigError(f"store.disk_dir={root}: {error.strerror}") from error
        self._tmp_prefix = f"{os.getpid()}-{started_at(os.getpid())}-{os.urandom(4).hex()}"
        self._tmp_numbers = count()
        self._threads = HelperThreads(THREADS, "kv-disk")
        self._lookups = DiskLookups(self._health)
        self._contents.begin_scan(then=lambda: self._eviction.reserve(0, keep=set()))

    def find(self, keys: Sequence[BlockKey]) -> list[bool]:
        if self._closed or self._health.is_paused:
            return [False] * len(keys)
        return self._exist([self._folder + key for key in keys])

    def read(self, keys: Sequence[BlockKey], into: Sequence[HostBytes]) -> list[bool]:
        self._check_usable()
        files = [self._folder + key for key in keys]
        wanted = [i for i, is_here in enumerate(self._exist(files)) if is_here]
        with self._contents.index() as index:
            # The first block of a chain counts as the last used one: without it the rest cannot be found.
            now_ns = index.now_ns()
            known = {i: index.get(files[i]) for i in wanted}
        to_note = {i for i, entry in known.items() if entry is None or now_ns - entry.noted_ns >= _NOTE_USE_NS}

        def read_one(i: int) -> _ReadOutcome:
            return self._read_one(files[i], into[i], now_ns - i if i in to_note else None)

        results = self._threads.each(read_one, wanted)
        done = [False] * len(keys)
        lost = []
        with self._contents.index() as index:
            for i, result in zip(wanted, results, strict=True):
                if result is _ReadOutcome.OK:
                    done[i] = True
                    # The block may have been removed since. The process that removed it has updated the index.
                    if files[i] in index or not self._contents.scanned.is_set():
                        index.use(files[i], self._file_bytes, now_ns - i, is_noted=i in to_note)
                elif result is not _ReadOutcome.FAILED:
                    self._num_corrupt += result is _ReadOutcome.WRONG
                    index.remove(files[i])
                    lost.append(files[i])
        self._contents.announce_lost(lost)
        if wanted and not any(done):
            self._check_usable()
        return done

    def write(self, names: Sequence[BlockName], data: Sequence[HostBytes], checksums: Sequence[int]) -> list[bool]:
        if self._closed or not self._health.is_writable:
            return [False] * len(names)
        blocks = {self._folder + given[0].key: given for given in zip(names, data, checksums, strict=True)}
        files = list(blocks)
        # Checked on disk: a process that was killed while it evicted has not announced it.
        here = {file: os.path.exists(path_of(self._root, file)) for file in files}
        wanted = [file for file in files if not here[file] and self._writes.can_hold(blocks[file][0])]
        with self._contents.index() as index:
            now_ns = index.now_ns()
            for i, file in enumerate(files):
                if here[file]:
                    index.use(file, self._file_bytes, now_ns - i, is_noted=False)
                else:
                    index.remove(file)
        wanted = wanted[: self._eviction.reserve(len(wanted), keep=set(files))]

        def write_one(i: int) -> bool:
            return self._write_one(wanted[i], *blocks[wanted[i]], now_ns - i)

        try:
            here |= dict(zip(wanted, self._threads.each(write_one, range(len(wanted))), strict=True))
        finally:
            with self._contents.index() as index:
                index.reserved_bytes -= len(wanted) * self._file_bytes
                for i, file in enumerate(wanted):
                    if here[file]:
                        index.use(file, self._file_bytes, now_ns - i, is_noted=True)
        self._contents.announce_added([file for file in wanted if here[file]], self._file_bytes)
        return [here[self._folder + name.key] for name in names]

    def drop(self, keys: Sequence[BlockKey]) -> None:
        files = [self._folder + key for key in keys]
        gone = [file for file in files if self._unlink(file)]
        with self._contents.index() as index:
            for file in files:
                index.remove(file)
        self._contents.announce_removed(gone)

    def catch_up(self) -> None:
        if not self._closed:
            self._lookups.run(lambda: self._contents.catch_up(force=True), _LOOKUP_S)

    def names(self) -> Iterator[BlockName]:
        """Read one page of every file. Right after the start it waits for the scan, which takes minutes for a million
        files."""
        self._contents.wait_for_scan()
        with self._contents.index() as index:
            files = [file for file in index.files() if file[:FOLDER_BYTES] == self._folder]
        names = []
        for file in files:
            # A wrong block is found and dropped when it is read.
            with suppress(OSError, CorruptBlock):
                names.append(self._reads.read_name(path_of(self._root, file), BlockKey(file[FOLDER_BYTES:])))
        return parents_first(names)

    def stats(self) -> TierStats:
        with self._contents.index() as index:
            return TierStats(
                blocks=len(index),
                used_bytes=index.num_bytes,
                capacity_bytes=self._capacity_bytes,
                evicted=self._eviction.num_evicted,
                corrupt=self._num_corrupt,
                errors=self._health.num_errors,
            )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._lookups.close()
        self._threads.close()
        self._contents.close()
        self._eviction.close()

    # ---- one block; called by several threads at a time

    def _read_one(self, file: FileId, into: HostBytes, use_ns: int | None) -> _ReadOutcome:
        path = path_of(self._root, file)
        if self._closed or self._health.is_paused:
            return _ReadOutcome.FAILED
        try:
            self._reads.read(path, BlockKey(file[FOLDER_BYTES:]), into, use_ns)
        except FileNotFoundError:
            return _ReadOutcome.MISSING
        except CorruptBlock as error:
            log.warning("disk_block_corrupt", path=path, reason=str(error))
            self._unlink(file)
            return _ReadOutcome.WRONG
        except OSError as error:
            self._health.failed("read", error)
            return _ReadOutcome.FAILED
        self._health.worked()
        return _ReadOutcome.OK

    def _write_one(self, file: FileId, name: BlockName, data: HostBytes, data_checksum: int, use_ns: int) -> bool:
        if self._closed or not self._health.is_writable:
            return False
        tmp = f"{self._tmp}/{self._tmp_prefix}-{next(self._tmp_numbers)}"
        path = path_of(self._root, file)
        try:
            try:
                self._writes.write(tmp, name, data, data_checksum, use_ns)
                os.rename(tmp, path)
            except FileNotFoundError:  # the first block of its folder, or the directory was emptied
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                self._tmp.mkdir(mode=0o700, exist_ok=True)
                if not os.path.exists(tmp):
                    self._writes.write(tmp, name, data, data_checksum, use_ns)
                os.rename(tmp, path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(tmp)
            self._health.failed("write", error)
            return False
        self._health.worked(is_write=True)
        return True

    def _unlink(self, file: FileId) -> bool:
        try:
            os.unlink(path_of(self._root, file))
        except FileNotFoundError:
            return False
        except OSError as error:
            self._health.failed("unlink", error)
            return False
        return True

    def _exist(self, files: Sequence[FileId]) -> list[bool]:
        return self._lookups.run(lambda: self._contents.exist(files), _LOOKUP_S)

    def _check_usable(self) -> None:
        if self._closed:
            raise TierUnavailable("the disk tier is closed")
        self._health.check()

    def _report(self, files: Sequence[FileId]) -> None:
        """Report lost blocks of this model to the store. The directory may hold other models too."""
        keys = [BlockKey(file[FOLDER_BYTES:]) for file in files if file[:FOLDER_BYTES] == self._folder]
        if keys:
            self._on_evicted(keys)

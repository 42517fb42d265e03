"""The memory of the host tier: a named file in /dev/shm that workers share and that outlives them, or private memory of
this process. Also the lock under which the table is changed, and which processes use a store."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from errno import EACCES, EAGAIN
from hashlib import sha256
from mmap import mmap
from pathlib import Path

from stoker.base.allowance import available_ram
from stoker.base.errors import ConfigError
from stoker.base.log import EventLog
from stoker.kv.blocks.transfer import TierUnavailable
from stoker.kv.store.tiers.host.host_table import HostGeometry, HostTable, read_geometry

log = EventLog("kv.host")

SHM = Path("/dev/shm")
LOCK_S = 2.0  # a change takes microseconds, so a longer wait means that the lock's holder is stopped
_GIB = 1 << 30
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = 16  # hex digits of the fingerprint in a file's name


@dataclass(frozen=True, slots=True)
class HostStore:
    """A named store in /dev/shm."""

    name: str
    path: Path
    used_bytes: int
    in_use: bool


def host_stores() -> list[HostStore]:
    """Return all stores of this user."""
    prefix = f"stoker-kv-{os.getuid()}-"
    stores = []
    for path in sorted(SHM.glob(f"{prefix}*")):
        with suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                name = path.name[len(prefix) : -_DIGEST - 1]
                stores.append(HostStore(name, path, os.fstat(fd).st_blocks * 512, _has_users(fd)))
            finally:
                os.close(fd)
    return stores


def remove_host_store(name: str) -> int:
    """Delete the stores of this name, of all models, and return how many there were. Workers that still use one keep
    their memory until they end."""
    ours = [store for store in host_stores() if store.name == name]
    for store in ours:
        store.path.unlink(missing_ok=True)
    return len(ours)


def private_memory(geometry: HostGeometry) -> tuple[int, mmap]:
    """Allocate memory that only this process uses."""
    available = available_ram()
    if geometry.total_bytes > available:
        raise ConfigError(_too_large(geometry, available, "of this machine's RAM"))
    fd = os.memfd_create("stoker-kv-host", os.MFD_CLOEXEC)
    return fd, _initialize(fd, geometry)


def shared_memory(name: str, fingerprint: str, geometry: HostGeometry) -> tuple[int, mmap]:
    """Open the named store, or create it. Every user holds a shared flock on the file as long as it runs."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"store.name={name!r}: use at most 64 letters, digits, '.', '_' and '-'")
    path = SHM / f"stoker-kv-{os.getuid()}-{name}-{sha256(fingerprint.encode()).hexdigest()[:_DIGEST]}"
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            memory = _attach(fd, path, geometry)
        except BaseException:
            if os.fstat(fd).st_size == 0:  # this process created the file, and failed to initialize it
                path.unlink(missing_ok=True)
            os.close(fd)
            raise
        if memory is not None:
            return fd, memory
        os.close(fd)


def _attach(fd: int, path: Path, geometry: HostGeometry) -> mmap | None:
    """Map the file and initialize it if necessary. Returns None if the file was deleted meanwhile."""
    stat = os.fstat(fd)
    if stat.st_uid != os.getuid():
        raise ConfigError(f"{path} belongs to user {stat.st_uid}: delete it, or choose another store.name")
    if not lock(fd, LOCK_S):
        raise TierUnavailable(f"{path}: another process has held its lock for {LOCK_S:g} s")
    try:
        try:
            if path.stat().st_ino != stat.st_ino:
                return None
        except FileNotFoundError:
            return None
        size = os.fstat(fd).st_size
        there = mmap(fd, size) if size >= 4096 else None
        existing = read_geometry(there) if there is not None else None
        if existing == geometry and there is not None and size == geometry.total_bytes:
            fcntl.flock(fd, fcntl.LOCK_SH)
            return there
        if size and _has_users(fd):
            raise ConfigError(
                f"store {path.name} is in use for {existing or 'another version'}; this worker needs {geometry}: "
                "choose another store.name"
            )
        if existing is not None:
            log.event("host_store_replaced", path=str(path), was=str(existing), now=str(geometry))
        os.ftruncate(fd, 0)
        free = os.statvfs(SHM)
        if geometry.total_bytes > free.f_bavail * free.f_frsize:
            raise ConfigError(_too_large(geometry, free.f_bavail * free.f_frsize, f"in {SHM}"))
        memory = _initialize(fd, geometry)
        fcntl.flock(fd, fcntl.LOCK_SH)
        return memory
    finally:
        unlock(fd)


def _initialize(fd: int, geometry: HostGeometry) -> mmap:
    """Size the file and initialize the table. Only the table's memory is allocated at once."""
    os.ftruncate(fd, geometry.total_bytes)
    os.posix_fallocate(fd, 0, geometry.offsets()["blocks"])
    memory = mmap(fd, geometry.total_bytes)
    HostTable(memory, geometry).initialize()
    return memory


def _too_large(geometry: HostGeometry, free_bytes: int, where: str) -> str:
    return (
        f"store.host_gib needs {geometry.total_bytes / _GIB:.2f} GiB, but only {free_bytes / _GIB:.2f} GiB {where} are free; "
        "lower store.host_gib"
    )


def _has_users(fd: int) -> bool:
    """Return True if any process uses the store. The file is opened again for the test, because a lock does not
    conflict with locks of the same opening."""
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(other)
    return False


def lock(fd: int, wait_s: float) -> bool:
    """Lock the file. The lock belongs to this opening of the file, not to the process, so two tiers of one process
    exclude each other, and the kernel releases it if the holder dies. It is polled, because the kernel's own wait has
    no timeout. Returns False after `wait_s`."""
    until_s = time.monotonic() + wait_s
    pause_s = 20e-6
    while True:
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_WRLCK))
        except OSError as error:
            if error.errno not in (EAGAIN, EACCES):
                raise
            if time.monotonic() > until_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1e-3)
        else:
            return True


def unlock(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_UNLCK))


def _whole_file(kind: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)  # struct flock of 64-bit Linux

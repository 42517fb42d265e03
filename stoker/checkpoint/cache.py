"""Build a cache folder exactly once: write a temporary folder, sync it, and rename it, under a lock.

A folder is complete only if it has `complete.json`, which is written last and lists every file with its size. A process that
is killed leaves at most a hidden `.tmp` folder, which the next builder removes. This module knows nothing about models.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stoker.base.errors import ModelFilesError
from stoker.checkpoint.progress import Progress

MARKER = "complete.json"
LOCK_POLL_S = 0.1
LOCK_DEADLINE_S = 3600.0
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def safe_name(name: str) -> str:
    """Return `name` with all characters replaced that a file name should not have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "model"


def is_complete(folder: Path, version: int) -> bool:
    """Return True if `folder` was completed by this `version` of its builder and every file still has its size."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in marker["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(marker.get("version") == version and sizes == marker["files"])


def build_once(folder: Path, version: int, build: Callable[[Path], None], progress: Progress) -> Path:
    """Return `folder`. If it is not complete, `build(temporary folder)` fills it first; concurrent processes build it once."""
    if is_complete(folder, version):
        return folder
    with disk_errors(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.parent / f".{folder.name}.lock", progress):
            if not is_complete(folder, version):
                _build(folder, version, build)
    return folder


def _build(folder: Path, version: int, build: Callable[[Path], None]) -> None:
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):  # from builders that were killed: we hold the lock now
        shutil.rmtree(left, ignore_errors=True)
    temporary = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
    replaced = folder.parent / f".{folder.name}.old.tmp"
    temporary.mkdir()
    try:
        build(temporary)
        sizes = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        (temporary / MARKER).write_text(json.dumps({"version": version, "files": sizes}, indent=1), encoding="utf-8")
        for path in temporary.iterdir():
            sync(path)
        sync(temporary)
        if folder.exists():  # incomplete, damaged, or of another version
            os.rename(folder, replaced)
        os.rename(temporary, folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock file `path`. The kernel releases the lock when the process ends for any reason."""
    with path.open("ab") as lock:
        deadline = time.monotonic() + LOCK_DEADLINE_S
        waited = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelFilesError(
                        f"another process has held the lock {path} for {LOCK_DEADLINE_S:.0f} s: stop that process, or "
                        "choose another cache folder (STOKER_CACHE)"
                    ) from None
                if not waited:
                    progress("waiting for another process that is preparing this model", 0, 1)
                waited = True
                time.sleep(LOCK_POLL_S)
        if waited:
            progress("waiting for another process that is preparing this model", 1, 1)
        yield


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raise ModelFilesError if the disk of `folder` has less than `needed_bytes` free."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise disk_full(folder, needed_bytes)


def disk_full(folder: Path, needed_bytes: int) -> ModelFilesError:
    """Return the error for a full disk. `needed_bytes` 0: unknown."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    needed = (
        f"{needed_bytes} bytes are needed and {free_bytes} are free" if needed_bytes else f"{free_bytes} bytes are free"
    )
    return ModelFilesError(
        f"not enough disk space in {folder}: {needed}. Free some space, or choose another cache folder (STOKER_CACHE)"
    )


@contextmanager
def disk_errors(folder: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turn an OSError from writing below `folder` into a ModelFilesError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise disk_full(folder, needed_bytes) from error
        raise ModelFilesError(
            f"{error.filename or folder}: {error.strerror or error}. Make it writable, or choose another cache folder "
            "(STOKER_CACHE)"
        ) from error


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

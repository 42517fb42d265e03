"""KernelCache: compiled kernels on disk, in this machine's folder and in read-only archives.

It takes the place of Triton's own cache, which stops the start at a corrupt file or an unwritable folder. Here, a file
whose checksum is wrong counts as missing, and a folder that cannot be written is replaced by a temporary one. Both cost
time, never the start. What an archive has is copied into the folder, because Triton wants paths.

Compiled kernels are code: launchers run in the engine process. A checksum finds damage, not forgery. So a folder that
other users can write to is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.kernels.compiled.kernel_archive import KernelArchive

Warn = Callable[[str, Path, str], None]  # what happened, to which file or folder, and why

_GROUP = "__group__"
_DIGEST_CHARS = 16
_FILE_NAME = re.compile(r"[\w.-]{1,200}")
_FOLDER_MODE = 0o755
_NEEDED = (".json", ".cubin")  # what a compiled kernel consists of; the other files are intermediate results


@dataclass(slots=True)
class CacheCounts:
    """Where the kernels of this process came from."""

    from_folder: int = 0
    from_archive: int = 0
    compiled: int = 0


class KernelCache:
    """The files of compiled kernels, by Triton's key and file name. All methods may be called from any thread."""

    def __init__(self, folder: Path, archives: Sequence[KernelArchive], warn: Warn) -> None:
        self.folder = folder
        self.counts = CacheCounts()
        self._archives = list(archives)
        self._warn = warn
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self._is_temporary = False
        if (reason := _distrusted(folder)) is not None:
            self._warn_once("kernel_cache_not_trusted", folder, reason)
            self._use_temporary_folder()

    def find(self, key: str, name: str) -> Path | None:
        """Return the path of a file with a correct checksum, or None."""
        return self._in_folder(key, name) or self._in_archives(key, name)

    def put(self, key: str, name: str, data: bytes) -> Path:
        """Store a file and return its path."""
        try:
            return _write(self.folder / key, name, data)
        except OSError as error:
            self._warn_once("kernel_cache_unwritable", self.folder, error.strerror or str(error))
        self._use_temporary_folder()
        return _write(self.folder / key, name, data)

    def find_group(self, key: str, name: str) -> dict[str, str] | None:
        """Return the paths of a kernel's files by their names, or None if one of them is missing."""
        is_stored = self._in_folder(key, _GROUP + name) is not None
        listed = self.find(key, _GROUP + name)
        if listed is None:
            return None
        found = {child: self.find(key, child) for child in self._read_list(listed)}
        if not found or None in found.values():
            return None
        with self._lock:
            self.counts.from_folder += is_stored
            self.counts.from_archive += not is_stored
        return {child: str(path) for child, path in found.items()}

    def put_group(self, key: str, name: str, children: Sequence[str]) -> Path:
        """Note which files belong to a kernel that was just compiled."""
        with self._lock:
            self.counts.compiled += 1
        kept = sorted(child for child in children if child.endswith(_NEEDED))
        return self.put(key, _GROUP + name, json.dumps(kept).encode())

    def _read_list(self, path: Path) -> list[str]:
        """Return the names in a list of files. It may come from an archive, so it may hold anything."""
        try:
            names = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            names = None
        if isinstance(names, list) and all(isinstance(name, str) and _FILE_NAME.fullmatch(name) for name in names):
            return names
        self._warn_once("kernel_cache_corrupt", path, "it is not a list of file names")
        return []

    def _use_temporary_folder(self) -> None:
        with self._lock:
            if not self._is_temporary:
                self.folder = Path(tempfile.mkdtemp(prefix="stoker-kernels-"))
                self._is_temporary = True
                weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def _in_folder(self, key: str, name: str) -> Path | None:
        try:
            paths = [path for path in (self.folder / key).iterdir() if path.name[_DIGEST_CHARS + 1 :] == name]
            for path in paths:
                if path.name == _stored_name(name, path.read_bytes()):
                    return path
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._warn_once("kernel_cache_unreadable", self.folder, error.strerror or str(error))
            return None
        for path in paths:
            self._warn_once("kernel_cache_corrupt", path, "its checksum is wrong; it is replaced")
        return None

    def _in_archives(self, key: str, name: str) -> Path | None:
        for archive in list(self._archives):
            try:
                data = archive.read(f"{key}/{name}")
            except (OSError, ValueError) as error:
                self._archives.remove(archive)
                self._warn_once("kernel_archive_unreadable", archive.path, str(error))
                continue
            if data is not None:
                return self.put(key, name, data)
        return None

    def _warn_once(self, what: str, where: Path, why: str) -> None:
        with self._lock:
            is_new = what not in self._warned
            self._warned.add(what)
        if is_new:
            self._warn(what, where, why)


def name_in_archive(path: Path) -> str | None:
    """Return the name under which an archive keeps this file of a cache's folder, or None if an archive does not need it."""
    name = path.name[_DIGEST_CHARS + 1 :]
    return f"{path.parent.name}/{name}" if name.endswith((*_NEEDED, ".so")) else None


def _stored_name(name: str, data: bytes) -> str:
    """Return the name of a stored file. It begins with the checksum of the contents."""
    return f"{hashlib.sha256(data).hexdigest()[:_DIGEST_CHARS]}-{name}"


def _distrusted(folder: Path) -> str | None:
    """Return why other users could put their own code into this folder, or None if they cannot."""
    try:
        found = folder.stat()
    except OSError:
        return None  # it is created, or reported when it is used
    if found.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {found.st_uid}, who could put other code there; use a folder of your own"
    if found.st_mode & stat.S_IWOTH:
        return "all users can write to it, and could put other code there; run chmod o-w on it, after emptying it"
    return None


def _write(folder: Path, name: str, data: bytes) -> Path:
    """Write a file so that other processes see all of it or nothing."""
    folder.parent.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
    folder.mkdir(_FOLDER_MODE, exist_ok=True)
    path = folder / _stored_name(name, data)
    number, temporary = tempfile.mkstemp(dir=folder)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def install(cache: KernelCache) -> None:
    """Make Triton use this cache. An operator who chose another one with TRITON_CACHE_MANAGER keeps it."""
    from triton import __version__, knobs
    from triton.runtime import cache as triton_cache

    if knobs.cache.manager_class is not None:
        return

    class Manager(triton_cache.CacheManager):  # type: ignore[misc]
        """Triton's view of one key."""

        def __new__(cls, key: str, override: bool = False, dump: bool = False) -> Any:
            if override or dump:  # for debugging kernels
                return triton_cache.FileCacheManager(key, override, dump)
            return super().__new__(cls)

        def __init__(self, key: str) -> None:
            self._key = key

        def get_file(self, filename: str) -> str | None:
            path = cache.find(self._key, filename)
            return None if path is None else str(path)

        def put(self, data: Any, filename: str, binary: bool = True) -> str:
            return str(cache.put(self._key, filename, data if isinstance(data, bytes) else str(data).encode()))

        def get_group(self, filename: str) -> dict[str, str] | None:
            return cache.find_group(self._key, filename)

        def put_group(self, filename: str, group: dict[str, str]) -> str:
            return str(cache.put_group(self._key, filename, list(group)))

    knobs.cache.manager_class = Manager
    knobs.compilation.store_binary_only = True
    knobs.compilation.disable_line_info = True  # it would hold the paths of the source files
    # Triton hashes its own library of 400 MB at every start, and the hash differs between Python versions. The version
    # identifies the compiled kernels just as well.
    triton_cache.triton_key = lambda: __version__

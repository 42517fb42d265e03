"""The work folder of a training: what it was started with, the answers, and the last checkpoint.

Every file is written beside its place and renamed, so that a process that is killed leaves the old or the new one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stoker.base.errors import ConfigError, StokerError

_PROBE_BYTES = 64 << 10
_IDENTITY = "identity.json"


class WorkFolderError(StokerError):
    """A file of the work folder or of the head cannot be written or read."""

    code = "work_folder_error"


def write_file(path: Path, data: bytes) -> None:
    """Replace a file. Raises WorkFolderError if it cannot be written; the old one is then unchanged."""
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
        raise WorkFolderError(f"{path} cannot be written: {error.strerror}; {len(data)} bytes were needed") from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raise ConfigError if the disk of this folder has less than `needed_bytes` free."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise ConfigError(
            f"{folder}: the training needs {needed_bytes / 1e6:.0f} MB of disk space, and {free / 1e6:.0f} MB are free; "
            "free some space or choose another folder"
        )


def model_identity(folder: Path) -> str:
    """Return a hash of config.json and of the beginning of each weight file."""
    found = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        found.update(f"{file.name} {file.stat().st_size}".encode())
        with file.open("rb") as weights:
            found.update(weights.read(_PROBE_BYTES))
    return found.hexdigest()[:16]


def check_same(kind: str, stored: Mapping[str, Any], wanted: Mapping[str, Any], what_to_do: str) -> None:
    """Raise ConfigError, with the name of the field, if a value differs from the stored one."""
    for name in {**wanted, **stored}:  # in the order of `wanted`
        if stored.get(name) != wanted.get(name):
            raise ConfigError(
                f"{kind} was made with {name}={stored.get(name)!r}, and now it is {wanted.get(name)!r}; {what_to_do}"
            )


class WorkFolder:
    """A folder that one process uses at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = path / "checkpoint.safetensors"
        self.answers = path / "answers"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out. Raises ConfigError if one is in, or if the folder cannot be made."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR, 0o644)
        except OSError as error:
            raise ConfigError(f"--work {self.path} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise ConfigError(f"--work {self.path} is used by another process; wait for it to end") from error
        try:
            self._remove_leftovers()
            yield
        finally:
            os.close(descriptor)

    def _remove_leftovers(self) -> None:
        """Remove the files that a killed process was writing."""
        for name in (f".{_IDENTITY}.*", f".{self.checkpoint.name}.*", f"{self.answers.name}/.*.safetensors.*"):
            for file in self.path.glob(name):
                file.unlink(missing_ok=True)

    def claim(self, identity: Mapping[str, Any]) -> None:
        """Record what the answers are made of, or check that it is the same as before."""
        file = self.path / _IDENTITY
        if not file.exists():
            write_file(file, json.dumps(identity, indent=2, sort_keys=True).encode())
            return
        try:
            stored = json.loads(file.read_text())
            assert isinstance(stored, dict)
        except (OSError, ValueError, AssertionError) as error:
            raise ConfigError(f"{file} is damaged; choose another --work or remove the folder") from error
        check_same(f"--work {self.path}", stored, identity, "choose another --work, or remove the folder")

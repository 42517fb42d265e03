"""KernelArchive: compiled kernels in one zip file, with a manifest that says what they were compiled from."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from lzma import LZMAError
from pathlib import Path

MANIFEST = "manifest.json"
SHIPPED_FOLDER = Path(__file__).parent / "shipped"
_KERNELS_FOLDER = Path(__file__).parent.parent
_MAX_MEMBER_BYTES = 64 << 20
_PIECE_BYTES = 4096  # compressed bytes that are unpacked at once: a hostile file expands to some ten megabytes at most
_DATE = (1980, 1, 1, 0, 0, 0)  # the same kernels give the same file


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an archive was compiled from, and for what."""

    arch: int  # the GPU's compute capability, such as 90
    triton: str  # Triton's version
    sources: str  # hash of the kernels' source files
    models: list[str]

    @property
    def is_valid(self) -> bool:
        """False if a field read from a file has another type, or text that a terminal could take for commands."""
        if type(self.arch) is not int or not isinstance(self.models, list):
            return False
        return all(isinstance(text, str) and text.isprintable() for text in (self.triton, self.sources, *self.models))


class KernelArchive:
    """A zip file of compiled kernels. Members are named by Triton's key and the file name: KEY/NAME.

    They are only read by name. Nothing is extracted to a path that the file chooses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    @property
    def manifest(self) -> Manifest:
        """Raises ValueError or OSError if the file cannot be read."""
        data = self.read(MANIFEST)
        if data is None:
            raise ValueError(f"it has no {MANIFEST}")
        try:
            manifest = Manifest(**json.loads(data))
        except (TypeError, RecursionError) as error:
            raise ValueError(f"its {MANIFEST} has other fields ({error})") from error
        if not manifest.is_valid:
            raise ValueError(f"its {MANIFEST} has a field of another type")
        return manifest

    @property
    def num_kernels(self) -> int:
        return sum(name.endswith(".cubin") for name in self._zip.namelist())

    def read(self, name: str) -> bytes | None:
        """Return a member, or None if there is none. Raises ValueError or OSError if the file cannot be read."""
        try:
            with self._lock, self._zip.open(name) as member:
                size = self._zip.getinfo(name).file_size
                if size > _MAX_MEMBER_BYTES:
                    raise ValueError(f"{name[:200]!r} has {size} bytes; the limit is {_MAX_MEMBER_BYTES}")
                return b"".join(iter(lambda: member.read(_PIECE_BYTES), b""))
        except KeyError:
            return None
        except (zipfile.BadZipFile, zlib.error, LZMAError, EOFError, NotImplementedError, RuntimeError) as error:
            raise ValueError(str(error) or type(error).__name__) from error

    @cached_property
    def _zip(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self.path)


def write_archive(path: Path, manifest: Manifest, members: Iterable[tuple[str, bytes]]) -> None:
    """Write an archive. The file at `path` is replaced once the new one is complete."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    try:
        with zipfile.ZipFile(temporary, "x") as archive:  # "x" follows no symbolic link that another user has put there
            for name, data in [(MANIFEST, json.dumps(asdict(manifest), indent=1).encode()), *sorted(members)]:
                archive.writestr(zipfile.ZipInfo(name, _DATE), data, zipfile.ZIP_LZMA)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def shipped_archive(triton_version: str, arch: int) -> Path:
    """Return where the archive for this version and GPU would be. It may not exist."""
    return SHIPPED_FOLDER / f"triton-{triton_version}-sm{arch}.zip"


def hash_of_sources() -> str:
    """Return a hash of all files that define kernels. An archive with another hash is stale."""
    hashed = hashlib.sha256()
    for file in sorted(_KERNELS_FOLDER.glob("*.py")):
        hashed.update(f"{file.name}\0".encode())
        hashed.update(file.read_bytes())
    return hashed.hexdigest()[:16]

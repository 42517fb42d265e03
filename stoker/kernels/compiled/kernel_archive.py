"""KernelArchive: compiled kernels in one zip file, with a manifest that says what they were compiled from."""

from __future__ import annotations

import hashlib
import json
import os
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
_DATE = (1980, 1, 1, 0, 0, 0)  # the same kernels give the same file


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an archive was compiled from, and for what."""

    arch: int  # the GPU's compute capability, such as 90
    triton: str  # Triton's version
    sources: str  # hash of the kernels' source files
    models: list[str]


class KernelArchive:
    """A zip file of compiled kernels. Members are named by Triton's key and the file name: KEY/NAME."""

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
            return Manifest(**json.loads(data))
        except TypeError as error:
            raise ValueError(f"its {MANIFEST} has other fields ({error})") from error

    @property
    def num_kernels(self) -> int:
        return sum(name.endswith(".cubin") for name in self._zip.namelist())

    def read(self, name: str) -> bytes | None:
        """Return a member, or None if there is none. Raises ValueError or OSError if the file cannot be read."""
        try:
            with self._lock:
                return self._zip.read(name)
        except KeyError:
            return None
        except (zipfile.BadZipFile, zlib.error, LZMAError, EOFError, NotImplementedError, RuntimeError) as error:
            raise ValueError(str(error) or type(error).__name__) from error

    @cached_property
    def _zip(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self.path)


def write_archive(path: Path, manifest: Manifest, members: Iterable[tuple[str, bytes]]) -> None:
    """Write an archive. The file at `path` is replaced once the new one is complete."""
    temporary = path.with_name(path.name + ".new")
    with zipfile.ZipFile(temporary, "w") as archive:
        for name, data in [(MANIFEST, json.dumps(asdict(manifest), indent=1).encode()), *sorted(members)]:
            archive.writestr(zipfile.ZipInfo(name, _DATE), data, zipfile.ZIP_LZMA)
    os.replace(temporary, path)


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

"""safetensors files as they lie on the drive: which tensor is where, and reading them ahead. Knows nothing of torch, so that
reading can begin while torch is still being imported."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from stoker.base.errors import ModelFilesError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
NUM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
_LONGEST_HEADER = 100_000_000  # the format's own limit
_AHEAD_THREADS = 8
# Blocks that are read ahead at a time. An import keeps the interpreter while it loads a library, some for tenths of a second, and
# what the drive has not been asked for by then waits as long.
_RUN_BLOCKS = 16
_PAGE = 4096  # what reads past the cache are aligned to
BLOCK_BYTES = 8 << 20  # of a file: what is taken at a time
_NOT_MAPPED = ctypes.c_void_p(-1).value
_NEARLY_ALL = 0.95


@dataclass(frozen=True, slots=True)
class StoredTensor:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # in the file
    num_bytes: int


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a model's folder, by name. Files that are missing, cut off or not the index's are named."""
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise _no_weights(folder)
        return read_header(folder / SINGLE)
    places = _weight_map(folder / INDEX)
    files = sorted(set(places.values()))
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise ModelFilesError(
            f"{folder} lacks {len(missing)} of the {len(files)} files that {INDEX} names: {', '.join(missing[:5])}. "
            "Fetch them into it"
        )
    headers = {file: read_header(folder / file) for file in files}
    for name, file in places.items():
        if name not in headers[file]:
            raise ModelFilesError(
                f"{folder / file} has no tensor {name!r}, where {INDEX} says it is: the two are of different versions; "
                "fetch the model again"
            )
    return {name: headers[file][name] for name, file in places.items()}


def weight_files(folder: Path) -> list[Path]:
    """Those that hold a model's tensors, in the order in which they are read; none that can be named is no error here."""
    try:
        names = set(_weight_map(folder / INDEX).values()) if (folder / INDEX).is_file() else {SINGLE}
    except ModelFilesError:
        return []
    return [folder / name for name in sorted(names)]


def _no_weights(folder: Path) -> ModelFilesError:
    others = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth"))
    found = f" (it has {', '.join(others[:3])}, which Stoker does not read)" if others else ""
    return ModelFilesError(f"{folder} has neither {SINGLE} nor {INDEX}{found}: fetch the model's safetensors")


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> its file's."""
    try:
        with naming(index):
            places = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelFilesError(f"{index}: no weight_map can be read from it ({error!r}); fetch it again") from error
    if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
        raise ModelFilesError(f"{index}: its weight_map does not say which tensor is in which file; fetch it again")
    return places


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """What the system says of reading `file`, with its name."""
    try:
        yield
    except FileNotFoundError as error:
        raise ModelFilesError(f"{file} is missing; fetch the model's folder again") from error
    except OSError as error:
        raise ModelFilesError(f"{file} cannot be read: {error.strerror or error}") from error


def read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with naming(file), file.open("rb") as data:
            num_bytes = os.fstat(data.fileno()).st_size
            header = _json_of(data.read(8), data.read, num_bytes)
    except ValueError as error:
        raise ModelFilesError(f"{file} is not a whole safetensors file ({error}); fetch it again") from error
    header_bytes, entries = header
    tensors = {}
    for name, entry in entries.items():
        if name != "__metadata__":
            tensors[name] = _tensor(file, name, entry, header_bytes)
    end = max((tensor.offset + tensor.num_bytes for tensor in tensors.values()), default=header_bytes)
    if end != num_bytes:
        raise ModelFilesError(
            f"{file} is not a whole safetensors file (it has {num_bytes} bytes, its header promises {end}); fetch it again"
        )
    return tensors


def _json_of(length: bytes, read: Any, num_bytes: int) -> tuple[int, dict[str, Any]]:
    """Where the data begins, and the header."""
    if len(length) < 8:
        raise ValueError(f"it has {num_bytes} bytes")
    (header_length,) = struct.unpack("<Q", length)
    if header_length > min(_LONGEST_HEADER, num_bytes - 8):
        raise ValueError(f"a header of {header_length} bytes in a file of {num_bytes}")
    entries = json.loads(read(header_length))
    if not isinstance(entries, dict):
        raise ValueError("its header is no JSON object")
    return 8 + header_length, entries


def _tensor(file: Path, name: str, entry: Any, header_bytes: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        num_bytes = prod(shape) * NUM_BYTES[dtype]
        if begin < 0 or end - begin != num_bytes:
            raise ValueError(f"{end - begin} bytes for {dtype} {shape}")
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFilesError(f"{file}: tensor {name!r} cannot be read ({error!r}); fetch it again") from error
    return StoredTensor(file, dtype, shape, header_bytes + begin, num_bytes)


def read_block(file: Path, number: int, into: memoryview) -> int:
    """A file's block, and as many after it as there is room for, into memory that begins at a page; how many bytes there are.
    Out of the system's cache where they are there, else past it: at the drive's own speed, and without driving out what
    others have there."""
    offset = number * BLOCK_BYTES
    fd = os.open(file, os.O_RDONLY)
    try:
        length = min(len(into), os.fstat(fd).st_size - offset)
        got = 0 if _is_resident(fd, offset, length) else _read_directly(file, into, offset, length)
        while got < length and (count := os.preadv(fd, [into[got:length]], offset + got)):
            got += count
        return min(got, length)
    finally:
        os.close(fd)


def is_cached(file: Path, number: int, num_blocks: int = 1) -> bool:
    """Whether the system holds blocks in memory, as good as all of them."""
    offset = number * BLOCK_BYTES
    fd = os.open(file, os.O_RDONLY)
    try:
        return _is_resident(fd, offset, min(num_blocks * BLOCK_BYTES, os.fstat(fd).st_size - offset))
    finally:
        os.close(fd)


def _is_resident(fd: int, offset: int, length: int) -> bool:
    """Asked without a read: even one that would not wait makes the system begin to read, beside us. True where nobody can tell."""
    libc = _libc()
    if libc is None or length <= 0:
        return True
    address = libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset)
    if address == _NOT_MAPPED:
        return True
    try:
        pages = ctypes.create_string_buffer(-(-length // _PAGE))
        if libc.mincore(address, length, pages):
            return True
        return pages.raw.count(1) >= _NEARLY_ALL * len(pages)
    finally:
        libc.munmap(address, length)


@cache
def _libc() -> ctypes.CDLL | None:
    """Linux's, with pages of the usual size."""
    if sys.platform != "linux" or mmap.PAGESIZE != _PAGE:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _read_directly(file: Path, into: memoryview, offset: int, length: int) -> int:
    try:
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except (OSError, AttributeError):  # this file system, or this system, cannot
        return 0
    try:
        return os.preadv(fd, [into[: -(-length // _PAGE) * _PAGE]], offset)
    except OSError:
        return 0
    finally:
        os.close(fd)


class ReadAhead:
    """Reads the blocks of files into memory, in their order, on threads, until somebody comes and takes them. What the system
    holds in its cache anyway is left there, and whatever is wrong with a file is left for others to say. The files' heads go into
    that cache first: others look at them meanwhile, and would each time wait behind all that the drive has been asked for."""

    def __init__(self, files: Sequence[Path], most_bytes: int) -> None:
        self._left = _runs([_one_name(file) for file in files], most_bytes)
        self._lock = threading.Lock()
        self._read: dict[tuple[Path, int], Future[dict[int, memoryview]]] = {}  # by file and first block: its blocks
        self._passed: set[tuple[Path, int]] = set()  # somebody reads them himself
        for file in files:
            _cache_head(file)
        for number in range(_AHEAD_THREADS if files else 0):
            threading.Thread(target=self._run, name=f"read-ahead-{number}", daemon=True).start()

    def take(self, file: Path, number: int) -> memoryview | None:
        """A block, once; None: it was not read. Waits for one that is being read."""
        run = (_one_name(file), number - number % _RUN_BLOCKS)
        with self._lock:
            found = self._read.get(run)
            if found is None:
                self._passed.add(run)
        return None if found is None else found.result().pop(number, None)

    def close(self) -> None:
        """Nobody wants what was not taken."""
        with self._lock:
            self._left = iter(())
            self._read.clear()

    def _run(self) -> None:
        while True:
            with self._lock:
                run = next((run for run in self._left if run not in self._passed), None)
                if run is None:
                    return
                done = self._read[run] = Future()
            try:
                done.set_result(_uncached_blocks(*run))
            except OSError:
                done.set_result({})


def _cache_head(file: Path) -> None:
    try:
        with file.open("rb") as data:
            data.read(min(_LONGEST_HEADER, *struct.unpack("<Q", data.read(8))))
    except (OSError, struct.error):
        return


def _uncached_blocks(file: Path, first: int) -> dict[int, memoryview]:
    """Those of a run, by their numbers; none where the system has them."""
    if is_cached(file, first, _RUN_BLOCKS):
        return {}
    into = memoryview(mmap.mmap(-1, _RUN_BLOCKS * BLOCK_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    read = into[: read_block(file, first, into)]
    return {first + at // BLOCK_BYTES: read[at : at + BLOCK_BYTES] for at in range(0, len(read), BLOCK_BYTES)}


def _one_name(file: Path) -> Path:
    """Whatever way it is named."""
    return Path(os.path.realpath(file))


def _runs(files: Sequence[Path], most_bytes: int) -> Iterator[tuple[Path, int]]:
    """Each by its first block."""
    for file in files:
        try:
            num_bytes = file.stat().st_size
        except OSError:
            continue
        yield from ((file, number) for number in range(0, -(-min(num_bytes, most_bytes) // BLOCK_BYTES), _RUN_BLOCKS))
        most_bytes -= min(num_bytes, most_bytes)

"""The files of a model folder, and safetensors: find each tensor's place in the files, and read them ahead of their use.

This module does not import torch, so that the engine process can start to read weights while torch is still being imported.
"""

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
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from stoker.base import garbage
from stoker.base.errors import ModelFilesError

_TOKENIZER_FILES = ("tokenizer.json", "tiktoken.model")  # the first that exists is used

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
NUM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_AHEAD_THREADS = 8
# Blocks per read request. An import can hold the interpreter lock for tenths of a second while it loads a library. No new read
# starts during that time, so that each request must be large enough to keep the drive busy.
_RUN_BLOCKS = 16
PAGE_BYTES = 4096  # direct I/O must be aligned to this
BLOCK_BYTES = 8 << 20  # the unit in which files are read
_NOT_MAPPED = ctypes.c_void_p(-1).value
_RESIDENT_RATIO = 0.95  # a block counts as cached when this part of its pages is in the page cache


class TensorLocation(NamedTuple):
    """The place of a tensor's bytes in a safetensors file. A tuple, because large models have 200,000 of them."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    num_bytes: int


def stored_tensors(folder: Path) -> dict[str, TensorLocation]:
    """Return the location of each tensor of a model folder, by tensor name.

    Raises ModelFilesError, which names the file, if a file is missing, truncated, or does not match the index. A tensor that is in
    two files is refused by its name: one of the two may be of another version.
    """
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise _no_weights(folder)
        return read_header(folder / SINGLE)
    places = _weight_map(folder / INDEX)
    files = sorted(set(places.values()))
    # os.path.isfile() is False for a name that no file can have; Path.is_file() raises.
    if missing := [file for file in files if not os.path.isfile(folder / file)]:
        raise ModelFilesError(
            f"{folder}: {len(missing)} of the {len(files)} files listed in {INDEX} are missing: {', '.join(missing[:5])}. "
            "Download them into this folder"
        )
    with garbage.paused():
        headers = {file: read_header(folder / file) for file in files}
        found: dict[str, TensorLocation] = {}
        for name, file in places.items():
            if (tensor := headers[file].get(name)) is None:
                raise ModelFilesError(
                    f"{folder / file} has no tensor {name!r}, although {INDEX} lists it there. The two files are from "
                    "different versions of the model: download the model again"
                )
            found[name] = tensor
        if sum(map(len, headers.values())) > len(found):
            for file, header in headers.items():
                for name in header:
                    if places.get(name, file) != file:
                        raise ModelFilesError(
                            f"{folder}: the tensor {name!r} is in {places[name]} and in {file}. The files may be from different "
                            "versions of the model: download the model again"
                        )
    return found


def tokenizer_file(folder: Path) -> Path:
    """Return the file that holds the vocabulary. It may be missing."""
    files = [folder / name for name in _TOKENIZER_FILES]
    return next((file for file in files if file.is_file()), files[0])


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a model's file. Raises ModelFilesError if it cannot be read."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFilesError(
            f"{path} cannot be read ({error.strerror or error}); check that the path is a model folder"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path} does not contain a JSON object; download it again")
    return content


def weight_files(folder: Path) -> list[Path]:
    """Return a model's weight files in reading order, or [] if the index cannot be read."""
    try:
        names = set(_weight_map(folder / INDEX).values()) if (folder / INDEX).is_file() else {SINGLE}
    except ModelFilesError:
        return []
    return [folder / name for name in sorted(names)]


def _no_weights(folder: Path) -> ModelFilesError:
    others = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth"))
    found = f" (Stoker cannot read {', '.join(others[:3])})" if others else ""
    return ModelFilesError(f"{folder} has neither {SINGLE} nor {INDEX}{found}: download the model's safetensors files")


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file name of each tensor, by tensor name."""
    try:
        with file_errors(index):
            places = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelFilesError(f"{index}: its weight_map cannot be read ({error!r}): download the file again") from error
    if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
        raise ModelFilesError(f"{index}: its weight_map must map tensor names to file names: download the file again")
    return places


@contextmanager
def file_errors(file: Path) -> Iterator[None]:
    """Raise ModelFilesError, with the file's name, for an OSError in the block."""
    try:
        yield
    except FileNotFoundError as error:
        raise ModelFilesError(f"{file} is missing: download the model again") from error
    except OSError as error:
        raise ModelFilesError(f"{file} cannot be read: {error.strerror or error}") from error


def read_header(file: Path) -> dict[str, TensorLocation]:
    """Return the tensors of one safetensors file, and check that the file has exactly the size that its header describes."""
    try:
        with file_errors(file), file.open("rb") as data:
            num_bytes = os.fstat(data.fileno()).st_size
            header = _json_of(data.read(8), data.read, num_bytes)
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{file} is not a complete safetensors file ({error}): download it again") from error
    header_bytes, entries = header
    entries.pop("__metadata__", None)
    tensors = {name: _tensor(file, name, entry, header_bytes) for name, entry in entries.items()}
    end = max((tensor.offset + tensor.num_bytes for tensor in tensors.values()), default=header_bytes)
    if end != num_bytes:
        raise ModelFilesError(
            f"{file} is not a complete safetensors file (it has {num_bytes} bytes, its header says {end}): download it again"
        )
    return tensors


def _json_of(length: bytes, read: Any, num_bytes: int) -> tuple[int, dict[str, Any]]:
    """Return the offset of the tensor data, and the parsed header."""
    if len(length) < 8:
        raise ValueError(f"it has only {num_bytes} bytes")
    (header_length,) = struct.unpack("<Q", length)
    if header_length > min(_MAX_HEADER_BYTES, num_bytes - 8):
        raise ValueError(f"a header of {header_length} bytes in a file of {num_bytes}")
    entries = json.loads(read(header_length))
    if not isinstance(entries, dict):
        raise ValueError("its header is not a JSON object")
    return 8 + header_length, entries


def _tensor(file: Path, name: str, entry: Any, header_bytes: int) -> TensorLocation:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        for number in (*shape, begin, end):
            if type(number) is not int or number < 0:
                raise ValueError(f"shape {shape} and data_offsets [{begin}, {end}] must be whole numbers of 0 or more")
        num_bytes = prod(shape) * NUM_BYTES[dtype]
        if begin < 0 or end - begin != num_bytes:
            raise ValueError(f"{end - begin} bytes for {dtype} {shape}")
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFilesError(
            f"{file}: the header of tensor {name!r} is invalid ({error!r}): download it again"
        ) from error
    return TensorLocation(file, dtype, shape, header_bytes + begin, num_bytes)


def read_bytes(file: Path, offset: int, into: memoryview) -> int:
    """Read bytes of a file from `offset` on, a multiple of a page, into page-aligned memory. Return the number of bytes.

    Bytes that are in the page cache are copied from there. Others are read with direct I/O, which is as fast as the drive and
    does not evict other data from the page cache.
    """
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
    """Return True if (nearly) all pages of these blocks are in the page cache."""
    offset = number * BLOCK_BYTES
    fd = os.open(file, os.O_RDONLY)
    try:
        return _is_resident(fd, offset, min(num_blocks * BLOCK_BYTES, os.fstat(fd).st_size - offset))
    finally:
        os.close(fd)


def _is_resident(fd: int, offset: int, length: int) -> bool:
    """Return True if the range is in the page cache, or if the system cannot tell.

    This uses mincore() and not a read: even a non-blocking read makes the kernel start its own read-ahead.
    """
    libc = _libc()
    if libc is None or length <= 0:
        return True
    address = libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset)
    if address == _NOT_MAPPED:
        return True
    try:
        pages = ctypes.create_string_buffer(-(-length // PAGE_BYTES))
        if libc.mincore(address, length, pages):
            return True
        return pages.raw.count(1) >= _RESIDENT_RATIO * len(pages)
    finally:
        libc.munmap(address, length)


@cache
def _libc() -> ctypes.CDLL | None:
    """Return the C library, or None on a system that is not Linux or has other page sizes."""
    if sys.platform != "linux" or mmap.PAGESIZE != PAGE_BYTES:
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
    except (OSError, AttributeError):  # the file system or the platform has no direct I/O
        return 0
    try:
        return os.preadv(fd, [into[: -(-length // PAGE_BYTES) * PAGE_BYTES]], offset)
    except OSError:
        return 0
    finally:
        os.close(fd)


class WeightReadAhead:
    """Reads the blocks of files into memory on background threads, in file order, until they are taken.

    Blocks in the page cache are skipped. Errors are ignored: the code that takes the blocks reads the file itself and reports
    them. The files' headers are read into the page cache first. They are parsed while the threads run, and would otherwise wait
    behind all queued reads of the drive.
    """

    def __init__(self, files: Sequence[Path], max_bytes: int) -> None:
        self._left = _runs([_real_path(file) for file in files], max_bytes)
        self._lock = threading.Lock()
        self._read: dict[tuple[Path, int], Future[dict[int, memoryview]]] = {}  # (file, first block) -> its blocks
        self._skipped: set[tuple[Path, int]] = set()  # the consumer reads these runs itself
        for file in files:
            _cache_head(file)
        for number in range(_AHEAD_THREADS if files else 0):
            threading.Thread(target=self._run, name=f"read-ahead-{number}", daemon=True).start()

    def take(self, file: Path, number: int) -> memoryview | None:
        """Return a block that was read ahead, and forget it. Wait if it is being read now. None: it was not read."""
        run = (_real_path(file), number - number % _RUN_BLOCKS)
        with self._lock:
            found = self._read.get(run)
            if found is None:
                self._skipped.add(run)
        return None if found is None else found.result().pop(number, None)

    def close(self) -> None:
        """Stop reading, and free the blocks that were not taken."""
        with self._lock:
            self._left = iter(())
            self._read.clear()

    def _run(self) -> None:
        while True:
            with self._lock:
                run = next((run for run in self._left if run not in self._skipped), None)
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
            data.read(min(_MAX_HEADER_BYTES, *struct.unpack("<Q", data.read(8))))
    except (OSError, struct.error):
        return


def _uncached_blocks(file: Path, first: int) -> dict[int, memoryview]:
    """Return the blocks of a run, by block number; {} if the page cache has them."""
    if is_cached(file, first, _RUN_BLOCKS):
        return {}
    into = memoryview(mmap.mmap(-1, _RUN_BLOCKS * BLOCK_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    read = into[: read_bytes(file, first * BLOCK_BYTES, into)]
    return {first + at // BLOCK_BYTES: read[at : at + BLOCK_BYTES] for at in range(0, len(read), BLOCK_BYTES)}


def _real_path(file: Path) -> Path:
    """Return the real path, so that a file reached through a link has one key."""
    return Path(os.path.realpath(file))


def _runs(files: Sequence[Path], max_bytes: int) -> Iterator[tuple[Path, int]]:
    """Yield (file, first block) of each run, for the first `max_bytes` of all files together."""
    for file in files:
        try:
            num_bytes = file.stat().st_size
        except OSError:
            continue
        yield from ((file, number) for number in range(0, -(-min(num_bytes, max_bytes) // BLOCK_BYTES), _RUN_BLOCKS))
        max_bytes -= min(num_bytes, max_bytes)

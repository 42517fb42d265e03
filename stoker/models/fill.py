"""Copies file bytes into tensor memory. Several threads read blocks, and each block is copied while the next one is
read.

Tensors on a GPU are filled from pinned buffers, without waiting for a copy before the next read. Tensors in RAM are
read in place. A file in another dtype is converted on the way.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stoker.base.errors import ModelFilesError
from stoker.checkpoint import weight_files
from stoker.checkpoint.weight_files import TensorLocation, WeightReadAhead, read_block

Progress = Callable[[int, int], None]

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "U16": torch.uint16, "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16,
    "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32, "U64": torch.uint64, "I64": torch.int64,
    "F64": torch.float64,
}  # fmt: skip
_THREADS = 8
_BUFFERS = 2  # per thread: one is read into while the other is copied from


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One tensor of a file, and the memory to copy it to."""

    stored: TensorLocation
    place: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in the file."""
        return TORCH_DTYPES[self.stored.dtype]

    @property
    def is_plain(self) -> bool:
        return self.dtype == self.place.dtype

    @property
    def is_unaligned(self) -> bool:
        """True if a value may cross a block boundary, because the tensor is not aligned. The format allows that."""
        return not self.is_plain and self.stored.offset % self.dtype.itemsize != 0

    @property
    def place_bytes(self) -> Tensor:
        return self.place.view(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of one tensor that lies in a block."""

    copy: Copy
    first: int  # first byte within the tensor
    at: int  # first byte within the block
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Block:
    """The wanted parts of one block of a file."""

    file: Path
    number: int
    parts: list[_Part]

    @property
    def num_bytes(self) -> int:
        return max(part.at + part.num_bytes for part in self.parts)


def fill(copies: Sequence[Copy], progress: Progress, ahead: WeightReadAhead | None = None) -> None:
    """Run all copies. `ahead` has started to read the files."""
    for copy in copies:
        assert copy.place.is_contiguous()
        assert copy.place.numel() * copy.dtype.itemsize == copy.stored.num_bytes
        if copy.is_unaligned:
            _fill_at_once(copy)
    ahead = ahead or WeightReadAhead([], 0)
    _Filling([copy for copy in copies if not copy.is_unaligned], progress, ahead).run()
    ahead.close()


class _Filling:
    """Runs copies on several threads."""

    def __init__(self, copies: Sequence[Copy], progress: Progress, ahead: WeightReadAhead) -> None:
        self._total = sum(copy.stored.num_bytes for copy in copies)
        self._blocks = iter(_blocks(copies))
        self._progress = progress
        self._ahead = ahead
        self._done = 0
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._device = copies[0].place.device if copies else torch.device("cpu")

    def run(self) -> None:
        number = min(_THREADS, 1 + self._total // weight_files.BLOCK_BYTES)
        on_gpu = self._device.type == "cuda"
        buffers = torch.empty(number * _BUFFERS, weight_files.BLOCK_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
        work = self._work_on_gpu if on_gpu else self._work_in_ram
        if number == 1:
            self._guarded(work, buffers)
        else:
            threads = [
                threading.Thread(target=self._guarded, args=(work, own_buffers), name="weights")
                for own_buffers in buffers.split(_BUFFERS)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error

    def _guarded(self, work: Callable[[Tensor], None], buffers: Tensor) -> None:
        try:
            with torch.no_grad():
                work(buffers)
        except Exception as error:  # raised again by the caller
            self._error = error

    def _work_on_gpu(self, buffers: Tensor) -> None:
        copied = [torch.cuda.Event() for _ in buffers]
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):
            for number, block in enumerate(self._take()):
                turn = number % _BUFFERS
                copied[turn].synchronize()
                self._read(block, buffers[turn])
                for part in block.parts:
                    _put(part, buffers[turn])
                copied[turn].record()
            for event in copied:
                event.synchronize()

    def _work_in_ram(self, buffers: Tensor) -> None:
        for block in self._take():
            if all(part.copy.is_plain for part in block.parts) and _is_cached(block):
                for part in block.parts:
                    into = part.copy.place_bytes[part.first : part.first + part.num_bytes]
                    _read_at(block.file, into, block.number * weight_files.BLOCK_BYTES + part.at)
            else:
                self._read(block, buffers[0])
                for part in block.parts:
                    _put(part, buffers[0])

    def _read(self, block: _Block, buffer: Tensor) -> None:
        read = self._ahead.take(block.file, block.number)
        if read is not None:
            buffer[: len(read)].copy_(torch.frombuffer(read, dtype=torch.uint8))
            num_read = len(read)
        else:
            with weight_files.file_errors(block.file):
                num_read = read_block(block.file, block.number, memoryview(buffer.numpy().data))
        if num_read < block.num_bytes:
            raise _truncated(block.file, block.number * weight_files.BLOCK_BYTES + num_read)

    def _take(self) -> Iterator[_Block]:
        """Yield blocks until there are none left or a thread has failed."""
        while self._error is None:
            with self._lock:
                block = next(self._blocks, None)
                if block is None:
                    return
                self._done += sum(part.num_bytes for part in block.parts)
                self._progress(self._done, self._total)
            yield block


def _blocks(copies: Sequence[Copy]) -> list[_Block]:
    """Return the blocks in file order."""
    blocks: dict[tuple[Path, int], _Block] = {}
    for copy in sorted(copies, key=lambda copy: (copy.stored.file, copy.stored.offset)):
        stored, first = copy.stored, 0
        while first < stored.num_bytes:
            number, at = divmod(stored.offset + first, weight_files.BLOCK_BYTES)
            count = min(stored.num_bytes - first, weight_files.BLOCK_BYTES - at)
            block = blocks.setdefault((stored.file, number), _Block(stored.file, number, []))
            block.parts.append(_Part(copy, first, at, count))
            first += count
    return list(blocks.values())


def _put(part: _Part, buffer: Tensor) -> None:
    """Copy a part to its place; on a GPU, without waiting."""
    copy, found = part.copy, buffer[part.at : part.at + part.num_bytes]
    if copy.is_plain:
        copy.place_bytes[part.first : part.first + part.num_bytes].copy_(found, non_blocking=True)
        return
    size = copy.dtype.itemsize
    values = found.to(copy.place.device, non_blocking=True).view(copy.dtype)
    copy.place.view(-1)[part.first // size : (part.first + part.num_bytes) // size].copy_(values)


def _fill_at_once(copy: Copy) -> None:
    data = torch.empty(copy.stored.num_bytes, dtype=torch.uint8)
    _read_at(copy.stored.file, data, copy.stored.offset)
    with torch.no_grad():
        copy.place.copy_(data.view(copy.dtype).view(copy.place.shape))


def _is_cached(block: _Block) -> bool:
    with weight_files.file_errors(block.file):
        return weight_files.is_cached(block.file, block.number)


def _read_at(file: Path, into: Tensor, offset: int) -> None:
    view, num_read = memoryview(into.numpy().data), 0
    with weight_files.file_errors(file), file.open("rb", buffering=0) as data:
        while num_read < len(view):
            count = os.preadv(data.fileno(), [view[num_read:]], offset + num_read)
            if count == 0:
                raise _truncated(file, offset + num_read)
            num_read += count


def _truncated(file: Path, offset: int) -> ModelFilesError:
    return ModelFilesError(f"{file} ends at byte {offset} while it is being read; download it again")

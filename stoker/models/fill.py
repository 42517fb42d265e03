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
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from stoker.base.errors import ModelFilesError
from stoker.checkpoint import weight_files
from stoker.checkpoint.weight_files import TensorLocation, WeightReadAhead, read_bytes
from stoker.models.family import SourceSlice

Progress = Callable[[int, int], None]

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "U16": torch.uint16, "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16,
    "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32, "U64": torch.uint64, "I64": torch.int64,
    "F64": torch.float64,
}  # fmt: skip
_THREADS = 8
_GAP_BYTES = 256 << 10  # a shorter gap between wanted bytes is read too
_BUFFERS = 2  # per thread: one is read into while the other is copied from


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A tensor of a file, or a slice of it, and the memory to copy it to.

    A slice is `run_bytes` bytes from byte `first` of every `row_bytes` bytes on. The whole tensor is a slice with one row.
    """

    stored: TensorLocation
    target: Tensor
    rows: tuple[int, int] | None  # first and count of the rows of `target` to fill; None: all
    row_bytes: int
    first: int
    run_bytes: int

    @classmethod
    def of(
        cls,
        stored: TensorLocation,
        target: Tensor,
        cut: SourceSlice | None = None,
        rows: tuple[int, int] | None = None,
    ) -> Copy:
        """Return the copy of a tensor, or of a slice of it along one axis."""
        if cut is None:
            return cls(stored, target, rows, stored.num_bytes, 0, stored.num_bytes)
        if cut.rows is not None:
            stored = _rows_of(stored, cut.rows)
        if cut.axis == 0:
            part = _rows_of(stored, cut)
            return cls(part, target, rows, part.num_bytes, 0, part.num_bytes)
        inner = prod(stored.shape[cut.axis + 1 :]) * weight_files.NUM_BYTES[stored.dtype]
        return cls(stored, target, rows, stored.shape[cut.axis] * inner, cut.first * inner, cut.count * inner)

    @property
    def place(self) -> Tensor:
        """The memory to fill. Made when it is needed: a view takes longer than the rest of the plan of a copy."""
        return self.target if self.rows is None else self.target.narrow(0, *self.rows)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in the file."""
        return TORCH_DTYPES[self.stored.dtype]

    @property
    def is_plain(self) -> bool:
        return self.dtype == self.target.dtype

    @property
    def num_bytes(self) -> int:
        """The bytes of the slice."""
        return self.stored.num_bytes // self.row_bytes * self.run_bytes if self.row_bytes else 0

    @property
    def is_unaligned(self) -> bool:
        """True if a value may cross a block boundary, because the tensor is not aligned. The format allows that."""
        return not self.is_plain and self.stored.offset % self.dtype.itemsize != 0

    @property
    def place_bytes(self) -> Tensor:
        return self.place.view(-1).view(torch.uint8)

    def runs(self, first: int, count: int, at: int) -> list[_StridedRuns]:
        """Return the slice's bytes among `count` bytes of the tensor from byte `first` on: the end of a row, whole rows, and
        the beginning of a row. The tensor's byte `first` is byte `at` of the block."""
        row, low, run_bytes = self.row_bytes, self.first, self.run_bytes
        (number, start), (last, end) = divmod(first, row), divmod(first + count, row)
        at -= first
        found: list[_StridedRuns] = []
        if start:
            found += self._part_of_row(number, start, min(row, start + count), at)
            number += 1
        if last > number:
            found.append(_StridedRuns(number * row + low + at, last - number, row, run_bytes, number * run_bytes))
        if end and last >= number:
            found += self._part_of_row(last, 0, end, at)
        return found

    def _part_of_row(self, number: int, start: int, end: int, at: int) -> list[_StridedRuns]:
        low, high = max(start, self.first), min(end, self.first + self.run_bytes)
        to = number * self.run_bytes + low - self.first
        return (
            [_StridedRuns(number * self.row_bytes + low + at, 1, self.row_bytes, high - low, to)] if low < high else []
        )


def _rows_of(stored: TensorLocation, cut: SourceSlice) -> TensorLocation:
    """Return a slice of the first axis. Its bytes are contiguous, so that the rest of the tensor does not count."""
    row_bytes = stored.num_bytes // stored.shape[0]
    shape, first, count = (cut.count, *stored.shape[1:]), cut.first * row_bytes, cut.count * row_bytes
    return TensorLocation(stored.file, stored.dtype, shape, stored.offset + first, count)


class _StridedRuns(NamedTuple):
    """`num_runs` runs of `num_bytes` bytes, `stride` apart from byte `at` on. They belong at byte `to` of the place."""

    at: int
    num_runs: int
    stride: int
    num_bytes: int
    to: int

    @property
    def end(self) -> int:
        return self.at + (self.num_runs - 1) * self.stride + self.num_bytes


class _Part(NamedTuple):
    """The part of one tensor that lies in a block."""

    copy: Copy
    runs: list[_StridedRuns]  # counted from the beginning of the block

    @property
    def num_bytes(self) -> int:
        return sum(runs.num_runs * runs.num_bytes for runs in self.runs)


@dataclass(frozen=True, slots=True)
class _Block:
    """The wanted parts of one block of a file."""

    file: Path
    number: int
    parts: list[_Part]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The bytes to read: those of all parts, with small gaps between them, which are read faster than skipped."""
        found: list[tuple[int, int]] = []
        for part in self.parts:
            for runs in part.runs:
                if runs.stride - runs.num_bytes < _GAP_BYTES:
                    found.append((runs.at, runs.end))
                else:
                    starts = range(runs.at, runs.end, runs.stride)
                    found += [(start, start + runs.num_bytes) for start in starts]
        merged: list[tuple[int, int]] = []
        for start, end in sorted(found):
            start -= start % weight_files.PAGE_BYTES
            if merged and start - merged[-1][1] < _GAP_BYTES:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        return merged


def fill(copies: Sequence[Copy], progress: Progress, ahead: WeightReadAhead | None = None) -> None:
    """Run all copies. `ahead` has started to read the files."""
    for copy in copies:
        assert copy.target.is_contiguous()
        if copy.is_unaligned:
            _fill_at_once(copy)
    ahead = ahead or WeightReadAhead([], 0)
    _Filling([copy for copy in copies if not copy.is_unaligned], progress, ahead).run()
    ahead.close()


class _Filling:
    """Runs copies on several threads."""

    def __init__(self, copies: Sequence[Copy], progress: Progress, ahead: WeightReadAhead) -> None:
        self._total = sum(copy.num_bytes for copy in copies)
        self._blocks = _blocks(copies)
        self._progress = progress
        self._ahead = ahead
        self._done = 0
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._device = copies[0].target.device if copies else torch.device("cpu")

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
            if all(map(_is_one_run, block.parts)) and _is_cached(block):
                for part in block.parts:
                    for runs in part.runs:
                        into = part.copy.place_bytes[runs.to : runs.to + runs.num_bytes]
                        _read_at(block.file, into, block.number * weight_files.BLOCK_BYTES + runs.at)
            else:
                self._read(block, buffers[0])
                for part in block.parts:
                    _put(part, buffers[0])

    def _read(self, block: _Block, buffer: Tensor) -> None:
        offset = block.number * weight_files.BLOCK_BYTES
        if (read := self._ahead.take(block.file, block.number)) is not None:
            buffer[: len(read)].copy_(torch.frombuffer(read, dtype=torch.uint8))
            if len(read) < max(end for _, end in block.ranges):
                raise _truncated(block.file, offset + len(read))
            return
        view = memoryview(buffer.numpy().data)
        for start, end in block.ranges:
            with weight_files.file_errors(block.file):
                # Whole pages, for direct I/O. More than that would cost time, but no more memory.
                whole = -(-end // weight_files.PAGE_BYTES) * weight_files.PAGE_BYTES
                num_read = read_bytes(block.file, offset + start, view[start:whole])
            if num_read < end - start:
                raise _truncated(block.file, offset + start + num_read)

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


def _blocks(copies: Sequence[Copy]) -> Iterator[_Block]:
    """Yield the blocks in file order."""
    block: _Block | None = None
    for copy in sorted(copies, key=lambda copy: (str(copy.stored.file), copy.stored.offset)):
        stored, first = copy.stored, 0
        while first < stored.num_bytes:
            number, at = divmod(stored.offset + first, weight_files.BLOCK_BYTES)
            count = min(stored.num_bytes - first, weight_files.BLOCK_BYTES - at)
            if runs := copy.runs(first, count, at):
                if block is None or block.number != number or block.file != stored.file:
                    if block is not None:
                        yield block
                    block = _Block(stored.file, number, [])
                block.parts.append(_Part(copy, runs))
            first += count
    if block is not None:
        yield block


def _is_one_run(part: _Part) -> bool:
    return part.copy.is_plain and all(runs.num_runs == 1 for runs in part.runs)


def _put(part: _Part, buffer: Tensor) -> None:
    """Copy a part to its place; on a GPU, without waiting."""
    copy, size = part.copy, part.copy.dtype.itemsize
    for runs in part.runs:
        found = buffer.as_strided((runs.num_runs, runs.num_bytes), (runs.stride, 1), runs.at + buffer.storage_offset())
        end = runs.to + runs.num_runs * runs.num_bytes
        if copy.is_plain:
            copy.place_bytes[runs.to : end].view(found.shape).copy_(found, non_blocking=True)
        else:
            values = found.to(copy.target.device, non_blocking=True).contiguous().view(-1).view(copy.dtype)
            copy.place.view(-1)[runs.to // size : end // size].copy_(values)


def _fill_at_once(copy: Copy) -> None:
    data = torch.empty(copy.stored.num_bytes, dtype=torch.uint8)
    _read_at(copy.stored.file, data, copy.stored.offset)
    rows = data.view(-1, copy.row_bytes)[:, copy.first : copy.first + copy.run_bytes].contiguous()
    with torch.no_grad():
        copy.place.copy_(rows.view(-1).view(copy.dtype).view(copy.place.shape))


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

"""The checksum of a block: one definition on every device, near the speed of memory, without the GIL while it runs.

The bytes are 64-bit little-endian words (the end padded with zeros), in rows of 1024. A row's sum is that of its words, each
times an odd weight of its column; each sum is folded and taken times an odd weight of its row; all of it, and the number of
bytes, are added up modulo 2**64. Any change of one word changes it; so do, but for about one case in 2**64, swapped, lost,
repeated or foreign words. It is no defence against somebody who makes up bytes.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROW_BYTES = 8192  # with its weights it stays in the first-level cache: half again as fast as rows of 32 KiB
_ROW_WORDS = ROW_BYTES // 8
CHUNK_BYTES = 1 << 19  # what stays in the second-level cache between the copy and the sum
_LENGTH_WEIGHT = 0x9E3779B97F4A7C15
_DEVICE_BYTES = 1 << 26  # of temporaries on a card at one time
_MASK = (1 << 64) - 1

HostBytes = NDArray[np.uint8]


def checksum(data: HostBytes) -> int:
    """Of one contiguous array of bytes."""
    running = RunningChecksum(len(data))
    running.add(data)
    return running.value()


def copy_checksummed(dst: HostBytes, src: HostBytes) -> int:
    """Copy, and the checksum of what was written: the copy is still in the cache when it is read again."""
    running = RunningChecksum(len(src))
    for start in range(0, len(src), CHUNK_BYTES):
        chunk = dst[start : start + CHUNK_BYTES]
        np.copyto(chunk, src[start : start + CHUNK_BYTES])
        running.add(chunk)
    return running.value()


class RunningChecksum:
    """The checksum of `num_bytes` that come in parts. Every part but the last is a multiple of ROW_BYTES long."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._sums = np.zeros(-(-num_bytes // ROW_BYTES), dtype=np.uint64)
        self._row = 0

    def add(self, data: HostBytes) -> None:
        num_rows, num_tail = divmod(len(data), ROW_BYTES)
        end = self._row + num_rows
        if num_rows:
            words = data[: num_rows * ROW_BYTES].view(np.uint64).reshape(num_rows, _ROW_WORDS)
            np.einsum("ij,j->i", words, _columns(), out=self._sums[self._row : end])
        if num_tail:
            assert end == len(self._sums) - 1, f"a part of {len(data)} bytes that is not the last"
            padded = np.zeros(-(-num_tail // 8) * 8, dtype=np.uint8)
            padded[:num_tail] = data[num_rows * ROW_BYTES :]
            last = padded.view(np.uint64)
            self._sums[end] = np.einsum("j,j->", last, _columns()[: len(last)])
        self._row = end

    def value(self) -> int:
        sums = self._sums
        folded = sums ^ (sums >> np.uint64(32))
        total = int(np.einsum("i,i->", folded, _rows(_table_size(len(sums)))[: len(sums)]))
        return (total + self._num_bytes * _LENGTH_WEIGHT) & _MASK


def tensor_checksums(blocks: Tensor) -> list[int]:
    """blocks [n, num_bytes] uint8, contiguous, on any device: the checksum of each. On a card it runs on the current stream
    and waits for the result."""
    assert blocks.dtype == torch.uint8, blocks.dtype
    num_blocks, num_bytes = blocks.shape
    if not num_blocks or not num_bytes:
        return [0] * num_blocks
    step = max(1, _DEVICE_BYTES // num_bytes)
    sums = torch.cat([_some_checksums(blocks[start : start + step]) for start in range(0, num_blocks, step)])
    return [(value + num_bytes * _LENGTH_WEIGHT) & _MASK for value in sums.tolist()]


def _some_checksums(blocks: Tensor) -> Tensor:
    num_blocks, num_bytes = blocks.shape
    num_rows = -(-num_bytes // ROW_BYTES)
    if num_rows * ROW_BYTES != num_bytes:  # zeros add nothing
        blocks = torch.nn.functional.pad(blocks, (0, num_rows * ROW_BYTES - num_bytes))
    words = blocks.view(torch.int64).view(num_blocks, num_rows, _ROW_WORDS)
    columns, rows = _weights_on(blocks.device, _table_size(num_rows))
    sums = (words * columns).sum(dim=2)  # integers wrap, signed or not
    folded = sums ^ ((sums >> 32) & 0xFFFFFFFF)  # the shift of a signed integer drags its sign along
    return (folded * rows[:num_rows]).sum(dim=1)


def _weights(seed: int, count: int) -> NDArray[np.uint64]:
    """splitmix64 of seed + 0, 1, ..., made odd."""
    with np.errstate(over="ignore"):
        x = (np.arange(count, dtype=np.uint64) + np.uint64(seed)) * np.uint64(_LENGTH_WEIGHT)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (x ^ (x >> np.uint64(31))) | np.uint64(1)


@lru_cache(maxsize=1)
def _columns() -> NDArray[np.uint64]:
    return _weights(1, _ROW_WORDS)


@lru_cache(maxsize=32)
def _rows(count: int) -> NDArray[np.uint64]:
    return _weights(1 << 40, count)


def _table_size(num_rows: int) -> int:
    """Tables are made for powers of two, so that there are few."""
    return max(1024, 1 << (num_rows - 1).bit_length())


@lru_cache(maxsize=64)
def _weights_on(device: torch.device, count: int) -> tuple[Tensor, Tensor]:
    columns, rows = _columns().view(np.int64), _rows(count).view(np.int64)
    return torch.from_numpy(columns).to(device), torch.from_numpy(rows).to(device)

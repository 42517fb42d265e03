"""The checksum of a block: the same value on every device, much cheaper than a copy, and computed without the GIL.

A block is cut into pieces of 512 KiB. Each piece is hashed with XXH3 (the last one padded with zeros to a whole KiB),
and the piece hashes together with the number of bytes are hashed again. The pieces are numerous enough to keep a GPU
busy and large enough that hashing threads rarely wait for the GIL. Flipped, swapped, shifted, missing or foreign bytes
change the checksum, except with a probability of 2**-64. It does not protect against deliberate
forgery.

Without the package xxhash, the kernel's reference implementation computes the same values slowly.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.kv.device.helper_threads import HelperThreads

# part of every format, folder name and handshake, so that data with another checksum is never mixed in
NAME = "xxh3-512k"
PIECE_BYTES = 1 << 19  # large enough to be worth a call, small enough to stay in the CPU cache after a copy
KIB = 1024

HostBytes = NDArray[np.uint8]


class PlainXxh3:
    """Replaces the package's xxh3_64 for data that is a whole number of KiB."""

    def __init__(self, data: bytes | memoryview = b"") -> None:
        self._parts = [bytes(data)]

    def update(self, data: bytes | memoryview) -> None:
        self._parts.append(bytes(data))

    def intdigest(self) -> int:
        from stoker.kernels.xxh3 import xxh3_digests, xxh3_pieces

        data = torch.frombuffer(bytearray(b"".join(self._parts)), dtype=torch.uint8)
        accs = xxh3_pieces(data[None], len(data) // KIB).numpy().view(np.uint64)
        return int(xxh3_digests(accs, len(data))[0, 0])

    def reset(self) -> None:
        self._parts = []


try:
    from xxhash import xxh3_64
except ImportError:
    xxh3_64 = PlainXxh3  # type: ignore[assignment,misc]


def checksum(data: HostBytes) -> int:
    """Return the checksum of a contiguous byte array."""
    running = RunningChecksum()
    running.add(data)
    return running.value()


def checksums(threads: HelperThreads, blocks: Sequence[HostBytes]) -> list[int]:
    """Return the checksum of each block. The threads share the pieces."""
    return _by_pieces(threads, blocks, lambda i, start: piece_digest(blocks[i][start : start + PIECE_BYTES]))


def piece_digest(data: HostBytes) -> int:
    """Return the hash of one piece. `combine_digests` makes the checksum of a block from them, for pieces that arrive
    in any order."""
    piece = xxh3_64(data.data)
    piece.update(bytes(-len(data) % KIB))
    return piece.intdigest()


def copy_with_checksums(threads: HelperThreads, dsts: Sequence[HostBytes], srcs: Sequence[HostBytes]) -> list[int]:
    """Copy each block, and return the checksums of what was written. A piece is hashed while it is still in the CPU
    cache."""

    def copy(i: int, start: int) -> int:
        piece = dsts[i][start : start + PIECE_BYTES]
        np.copyto(piece, srcs[i][start : start + PIECE_BYTES])
        return piece_digest(piece)

    return _by_pieces(threads, srcs, copy)


def _by_pieces(threads: HelperThreads, blocks: Sequence[HostBytes], digest: Callable[[int, int], int]) -> list[int]:
    """Return the checksum of each block. `digest(i, start)` returns the hash of the piece of block `i` that begins at
    `start`."""
    pieces = [(i, start) for i, block in enumerate(blocks) for start in range(0, len(block), PIECE_BYTES)]
    digests: list[list[int]] = [[] for _ in blocks]
    for (i, _), piece_hash in zip(pieces, threads.each(lambda piece: digest(*piece), pieces), strict=True):
        digests[i].append(piece_hash)
    return [combine_digests(hashes, len(block)) for hashes, block in zip(digests, blocks, strict=True)]


class RunningChecksum:
    """The checksum of bytes that arrive in parts. `value` may be called once."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._digests: list[int] = []
        self._piece = xxh3_64()

    def add(self, data: HostBytes) -> None:
        start = 0
        while start < len(data):
            end = min(len(data), start + PIECE_BYTES - self._num_bytes % PIECE_BYTES)
            self._piece.update(data[start:end].data)
            self._num_bytes += end - start
            if self._num_bytes % PIECE_BYTES == 0:
                self._end_piece()
            start = end

    def value(self) -> int:
        if tail := self._num_bytes % PIECE_BYTES:
            self._piece.update(bytes(-tail % KIB))
            self._end_piece()
        return combine_digests(self._digests, self._num_bytes)

    def _end_piece(self) -> None:
        self._digests.append(self._piece.intdigest())
        self._piece.reset()


def tensor_checksums(blocks: Tensor) -> list[int]:
    """Return the checksum of each row. blocks: [n, num_bytes] uint8, contiguous, on any device.

    On a GPU the work runs on the current stream, and the call waits for the result.
    """
    # Imported here because a process that has initialized CUDA, as the kernels do, can no longer be forked.
    from stoker.kernels.xxh3 import xxh3_digests, xxh3_pieces

    assert blocks.dtype == torch.uint8, blocks.dtype
    num_blocks, num_bytes = blocks.shape
    if not num_blocks:
        return []
    if num_bytes % KIB:
        blocks = torch.nn.functional.pad(blocks, (0, -num_bytes % KIB))
    accs = xxh3_pieces(blocks, PIECE_BYTES // KIB).cpu().numpy().view(np.uint64)
    digests = np.empty(accs.shape[:2], np.uint64)
    digests[:, :-1] = xxh3_digests(accs[:, :-1], PIECE_BYTES)
    digests[:, -1] = xxh3_digests(accs[:, -1], (blocks.shape[1] - 1) % PIECE_BYTES + 1)
    return [combine_digests(hashes, num_bytes) for hashes in digests.tolist()]


def combine_digests(digests: Sequence[int], num_bytes: int) -> int:
    """Return the checksum of a block of `num_bytes` bytes from the hashes of its pieces."""
    packed = struct.pack(f"<{len(digests) + 1}Q", *digests, num_bytes)
    return xxh3_64(packed + bytes(-len(packed) % KIB)).intdigest()

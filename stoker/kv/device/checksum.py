"""The checksum of a block: one definition on every device, at a fraction of what copying costs, without the GIL while it runs.

A block is cut into pieces of 512 KiB; each is hashed by XXH3 (the last one with zeros up to a whole KiB), and so are all their
hashes with the number of bytes. There are enough pieces to keep a card busy, and few enough that threads which hash hardly meet
at the GIL. Whatever was flipped, swapped, shifted, lost or foreign changes it, but for one case in 2**64. It is no defence
against somebody who makes up bytes.

Without the package xxhash the same numbers come from the kernel's reference, slowly.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.kv.device.thread_crew import Crew

NAME = "xxh3-512k"  # is part of whatever says which bytes may be shared: formats, folders, handshakes
PIECE_BYTES = 1 << 19  # worth a call, and still in the cache when it is hashed after it was moved
KIB = 1024

HostBytes = NDArray[np.uint8]


class PlainXxh3:
    """What is used of the package's xxh3_64, for bytes in whole KiB."""

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
    """Of one contiguous array of bytes."""
    running = RunningChecksum()
    running.add(data)
    return running.value()


def checksums(crew: Crew, blocks: Sequence[HostBytes]) -> list[int]:
    """Of each; the crew shares out their pieces."""
    return _by_pieces(crew, blocks, lambda at, start: piece_digest(blocks[at][start : start + PIECE_BYTES]))


def piece_digest(data: HostBytes) -> int:
    """Of one piece: `total` makes the checksum of all of them. For those whose pieces do not come in order."""
    piece = xxh3_64(data.data)
    piece.update(bytes(-len(data) % KIB))
    return piece.intdigest()


def copies_checksummed(crew: Crew, dsts: Sequence[HostBytes], srcs: Sequence[HostBytes]) -> list[int]:
    """Copy each, and the checksum of what was written: a piece is still in the cache when it is read again."""

    def copy(at: int, start: int) -> int:
        piece = dsts[at][start : start + PIECE_BYTES]
        np.copyto(piece, srcs[at][start : start + PIECE_BYTES])
        return piece_digest(piece)

    return _by_pieces(crew, srcs, copy)


def _by_pieces(crew: Crew, blocks: Sequence[HostBytes], digest: Callable[[int, int], int]) -> list[int]:
    """`digest(at, start)`: of the piece that begins there in block `at`."""
    pieces = [(at, start) for at, block in enumerate(blocks) for start in range(0, len(block), PIECE_BYTES)]
    digests: list[list[int]] = [[] for _ in blocks]
    for (at, _), found in zip(pieces, crew.each(lambda piece: digest(*piece), pieces), strict=True):
        digests[at].append(found)
    return [total(some, len(block)) for some, block in zip(digests, blocks, strict=True)]


class RunningChecksum:
    """The checksum of bytes that come in parts. Its value is asked for once."""

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
        return total(self._digests, self._num_bytes)

    def _end_piece(self) -> None:
        self._digests.append(self._piece.intdigest())
        self._piece.reset()


def tensor_checksums(blocks: Tensor) -> list[int]:
    """blocks [n, num_bytes] uint8, contiguous, on any device: the checksum of each. On a card it runs on the current stream
    and waits for the result."""
    # Not at the top: a process that has asked for a card, as kernels do, cannot be forked any more.
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
    return [total(some, num_bytes) for some in digests.tolist()]


def total(digests: Sequence[int], num_bytes: int) -> int:
    """The checksum of a block of so many bytes, from its pieces' digests."""
    packed = struct.pack(f"<{len(digests) + 1}Q", *digests, num_bytes)
    return xxh3_64(packed + bytes(-len(packed) % KIB)).intdigest()

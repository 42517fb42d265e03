"""Arrivals: the checksums of blocks that a call of Mooncake's client is still filling.

The call says nothing before it ends, and by then its first bytes have left the cache: reading all of them once more takes a fifth
of the time in which they came. So every piece of a block gets a mark in its last bytes; when the mark is overwritten, the piece has
come, and is summed up at once. One that was summed up too early, since nobody promises an order of bytes, makes a wrong checksum
and costs a second look after the call's end, when all is there. What comes twice is looked at once: a transfer that the client
repeats brings the same bytes of the same object.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from secrets import token_bytes
from typing import Any

from stoker.kv.checksum import PIECE_BYTES, checksums, piece_digest, total
from stoker.kv.crew import Crew
from stoker.kv.tiers.contract import HostBytes

_MARK_BYTES = 16
_LOOK_EVERY_S = 0.001
_WINDOW = 8  # blocks that are looked at, from the first one that is not whole: they come about in order


@dataclass(slots=True, eq=False)
class _Block:
    pieces: list[HostBytes]
    ends: list[HostBytes]  # of each piece: where its mark is
    digests: list[int] = field(default_factory=list)  # of leading pieces

    def is_whole(self) -> bool:
        return len(self.digests) == len(self.pieces)


class Arrivals:
    def __init__(self, buffers: Sequence[HostBytes]) -> None:
        self._buffers = buffers
        self._mark = token_bytes(_MARK_BYTES)
        self._blocks = [self._marked(buffer) for buffer in buffers]

    def follow(self, call: Future[Any], until_s: float) -> None:
        """Sum up what comes, until the call has ended or the time (monotonic) is over."""
        first = 0  # that is not whole
        while not call.done() and time.monotonic() < until_s:
            window = self._blocks[first : first + _WINDOW]
            if sum(map(self._take, window)) < len(window):
                # There is nothing to do but to wait, and the client needs the cores.
                with suppress(TimeoutError):
                    call.exception(_LOOK_EVERY_S)
            first += sum(1 for _ in takewhile(_Block.is_whole, window))

    def right(self, crew: Crew, expected: Mapping[int, int]) -> frozenset[int]:
        """Which of these blocks, by number, have the checksum that is expected. The call has ended."""
        blocks = {at: self._blocks[at] for at in expected}
        left = [(block, piece) for block in blocks.values() for piece in block.pieces[len(block.digests) :]]
        for (block, _), digest in zip(left, crew.each(lambda one: piece_digest(one[1]), left), strict=True):
            block.digests.append(digest)
        found = {at: total(block.digests, len(self._buffers[at])) for at, block in blocks.items()}
        wrong = [at for at, of_bytes in found.items() if of_bytes != expected[at]]
        found |= zip(wrong, checksums(crew, [self._buffers[at] for at in wrong]), strict=True)
        return frozenset(at for at, of_bytes in found.items() if of_bytes == expected[at])

    def _marked(self, buffer: HostBytes) -> _Block:
        pieces = [buffer[start : start + PIECE_BYTES] for start in range(0, len(buffer), PIECE_BYTES)]
        ends = [piece[-_MARK_BYTES:] for piece in pieces]
        for end in ends:
            end.data[:] = self._mark[: len(end)]
        return _Block(pieces, ends)

    def _take(self, block: _Block) -> int:
        """How many pieces have come since the last look."""
        before = at = len(block.digests)
        while at < len(block.pieces) and not self._mark.startswith(block.ends[at].tobytes()):
            block.digests.append(piece_digest(block.pieces[at]))
            at += 1
        return at - before

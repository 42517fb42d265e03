"""PrefixMatches: how many leading blocks of a conversation each worker holds, without a table of all workers.

Thousands of workers may hold a system prompt that all conversations share. So the answer of the index is kept as runs: the
workers, as a bit mask, that hold exactly so many leading blocks. A worker's entry is computed when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stoker.base.ids import WorkerId

Runs = Sequence[tuple[int, int]]  # (bits of workers, their leading blocks), by ascending blocks; none of zero


@dataclass(slots=True)
class Match:
    """How many leading blocks of a conversation one worker holds. Each tier counts only blocks not in a faster tier."""

    device_blocks: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0

    @property
    def blocks(self) -> int:
        return self.device_blocks + self.host_blocks + self.disk_blocks


class PrefixMatches(Mapping[WorkerId, Match]):
    """A Match for every worker that has at least the first block, in its own tiers or in a shared store."""

    __slots__ = ("_bits", "_device", "_disk", "_host", "_ids")

    def __init__(
        self, bits: Mapping[WorkerId, int], ids: Mapping[int, WorkerId], device: Runs, host: Runs, disk: Runs
    ) -> None:
        """`host` are the runs in device or host memory, and `disk` those in any tier."""
        self._bits = bits
        self._ids = ids
        self._device = device
        self._host = host
        self._disk = disk

    @property
    def most_blocks(self) -> int:
        """The most leading blocks that any worker holds."""
        return self._disk[-1][1] if self._disk else 0

    def longest(self, count: int) -> list[WorkerId]:
        """Return up to `count` workers, those with the most blocks first."""
        found: list[WorkerId] = []
        for mask, _ in reversed(self._disk):
            while mask and len(found) < count:
                bit = mask & -mask
                found.append(self._ids[bit])
                mask ^= bit
        return found

    def __getitem__(self, worker_id: WorkerId) -> Match:
        bit = self._bits.get(worker_id, 0)
        blocks = _blocks(self._disk, bit)
        if not blocks:
            raise KeyError(worker_id)
        if self._disk is self._device:
            return Match(blocks)
        in_device = _blocks(self._device, bit)
        in_host = _blocks(self._host, bit) or in_device
        return Match(in_device, in_host - in_device, blocks - in_host)

    def get(self, worker_id: WorkerId, default: Match | None = None) -> Match | None:  # type: ignore[override]
        """Return the worker's entry. It is written out, because the router calls it for each candidate."""
        bit = self._bits.get(worker_id, 0)
        if self._disk is self._device:
            for mask, blocks in self._disk:
                if mask & bit:
                    return Match(blocks)
            return default
        try:
            return self[worker_id]
        except KeyError:
            return default

    def __iter__(self) -> Iterator[WorkerId]:
        for mask, _ in self._disk:
            while mask:
                bit = mask & -mask
                yield self._ids[bit]
                mask ^= bit

    def __len__(self) -> int:
        return sum(mask.bit_count() for mask, _ in self._disk)

    def __bool__(self) -> bool:
        return bool(self._disk)


def _blocks(runs: Runs, bit: int) -> int:
    for mask, blocks in runs:
        if mask & bit:
            return blocks
    return 0

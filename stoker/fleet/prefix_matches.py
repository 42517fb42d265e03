"""PrefixMatches: how many leading blocks of a conversation each worker holds, without a table of all workers.

Thousands of workers may hold a system prompt that all conversations share. So the answer of the index is kept as runs. A run is a
number of leading blocks, and a bit mask of the workers that hold exactly this number. A worker's entry is computed when it is
read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from stoker.base.ids import WorkerId

Runs = Sequence[tuple[int, int]]  # (bits of workers, their leading blocks), by ascending blocks; none of zero


@dataclass(frozen=True, slots=True)
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

    __slots__ = ("_bits", "_device", "_disk", "_host", "_ids", "_on_device")

    def __init__(
        self, bits: Mapping[WorkerId, int], ids: Mapping[int, WorkerId], device: Runs, host: Runs, disk: Runs
    ) -> None:
        """`host` are the runs in device or host memory, and `disk` those in any tier."""
        self._bits = bits
        self._ids = ids
        self._device = device
        self._host = host
        self._disk = disk
        # Where no other tier holds anything, all workers of a run share one entry.
        self._on_device = [(mask, Match(blocks)) for mask, blocks in disk] if disk is device else None

    @property
    def most_blocks(self) -> int:
        """The most leading blocks that any worker holds."""
        return self._disk[-1][1] if self._disk else 0

    @property
    def num_longest(self) -> int:
        """How many workers hold that many."""
        return self._disk[-1][0].bit_count() if self._disk else 0

    def longest(self, count: int, few: int) -> Iterator[tuple[list[WorkerId], Callable[[WorkerId], bool]]]:
        """Yield groups of workers with equally many blocks, the most first, until they have `count` workers together.

        A group is a list, and a function that tells whether a worker is in it. The list is empty if it would have more than
        `few` entries.
        """
        for mask, _ in reversed(self._disk):
            size = mask.bit_count()
            listed: list[WorkerId] = []
            rest = mask if size <= few else 0
            while rest:
                bit = rest & -rest
                listed.append(self._ids[bit])
                rest ^= bit
            yield listed, partial(_is_in, mask, self._bits)
            count -= size
            if count <= 0:
                return

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

    def of(self, worker_ids: Iterable[WorkerId]) -> list[Match | None]:
        """Return the entry of each worker, or None. It is one loop, because a decision looks up all workers."""
        runs, bits = self._on_device, self._bits
        if runs is None:
            return [self.get(worker_id) for worker_id in worker_ids]
        found: list[Match | None] = []
        for worker_id in worker_ids:
            bit = bits.get(worker_id, 0)
            for mask, match in runs:
                if mask & bit:
                    found.append(match)
                    break
            else:
                found.append(None)
        return found

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


def _is_in(mask: int, bits: Mapping[WorkerId, int], worker_id: WorkerId) -> bool:
    return bool(mask & bits.get(worker_id, 0))


def _blocks(runs: Runs, bit: int) -> int:
    for mask, blocks in runs:
        if mask & bit:
            return blocks
    return 0


NO_MATCHES = PrefixMatches({}, {}, (), (), ())

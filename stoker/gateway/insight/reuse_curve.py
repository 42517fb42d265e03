"""ReuseCurve: how much of the prompts a cache of any size would have held, from a sample of prefix blocks. Pure.

For each use of a block, its *reuse distance* is how many different blocks were used since its last use. A cache of C blocks that
evicts the least recently used one holds exactly the blocks whose distance is below C. So one histogram of distances gives the
hit ratio of every size.

Only one block in `RATE` is followed, chosen by its position and its key. A prefix key stands for all blocks before it, so its
position never changes, and the same blocks are chosen in every turn. Distances and sizes are scaled by `RATE`.

The curve is that of one cache for all workers. With several workers it is a good estimate as long as the router sends a
conversation to the worker that has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import log2

_STRIDE = 16  # follows the blocks at positions 15, 31, 47, …
_KEY_SHARE = 8  # and of these, those whose key is divisible by this
RATE = _STRIDE * _KEY_SHARE
_PER_OCTAVE = 4  # buckets for each doubling of the distance
_OCTAVES = 40
_FLAT_SHARE = 0.05  # sizes that hit less than this share of the most are not worth showing
_HALF_S = 3600.0  # the weight of old uses halves in this time


class ReuseCurve:
    """The sampled blocks in the order of their last use, and the histogram of their reuse distances, in tokens."""

    def __init__(self, max_blocks: int = 1 << 15) -> None:
        """Follow at most `max_blocks` sampled blocks. Reuse beyond that counts as a first use."""
        self._max_blocks = max_blocks
        self._used_at: dict[int, int] = {}  # key -> number of its last use, least recently used first
        self._size = 2 * max_blocks
        self._tree = [0] * (self._size + 1)  # Fenwick tree over the uses: 1 where a block was last used
        self._next = 1
        self._counts = [0.0] * (_PER_OCTAVE * _OCTAVES)
        self._total = 0.0
        self._weighed_s: float | None = None
        self._block_tokens = 16

    def sample(self, keys: Sequence[int | bytes]) -> list[int]:
        """Return the followed keys of a prompt. It is the only part of the work that grows with the prompt."""
        return [
            key for key in islice(keys, _STRIDE - 1, None, _STRIDE) if isinstance(key, int) and not key % _KEY_SHARE
        ]

    def use(self, sampled: Sequence[int], block_tokens: int, now: float) -> None:
        """Count the use of the sampled keys of one prompt."""
        self._decay(now)
        self._block_tokens = block_tokens
        for key in sampled:
            distance = self._touch(key)
            self._total += 1
            if distance is not None:
                self._counts[_bucket(distance * RATE * block_tokens)] += 1

    def hit_ratio(self, capacity_tokens: float) -> float | None:
        """Return the share of the sampled blocks that a cache of this size would have held. None: nothing was sampled."""
        if not self._total:
            return None
        whole = _position(capacity_tokens)
        last = min(int(whole), len(self._counts) - 1)
        hits = sum(self._counts[:last]) + self._counts[last] * min(1.0, whole - last)
        return hits / self._total

    def points(self) -> list[tuple[int, float]]:
        """Return (tokens, hit ratio) at each doubling, from where it begins to rise to where nothing more is gained."""
        if not self._total:
            return []
        used = [i for i, count in enumerate(self._counts) if count]
        first, last = (used[0], used[-1]) if used else (10 * _PER_OCTAVE, 20 * _PER_OCTAVE)
        low, high = max(0, first // _PER_OCTAVE - 1), last // _PER_OCTAVE + 2
        found = [(1 << octave, round(self.hit_ratio(1 << octave) or 0.0, 4)) for octave in range(low, high + 1)]
        num_flat = sum(ratio < _FLAT_SHARE * found[-1][1] for _, ratio in found)
        return found[max(0, min(num_flat, len(found) - 1) - 1) :]

    @property
    def max_tokens(self) -> int:
        """The largest cache that the curve can tell about."""
        return self._max_blocks * RATE * self._block_tokens

    # ---- reuse distances

    def _touch(self, key: int) -> int | None:
        """Move the block to the recent end. Return how many other blocks were used since its last use; None: it is new."""
        before = self._used_at.pop(key, None)
        distance = None
        if before is not None:
            distance = len(self._used_at) + 1 - self._count_to(before)
            self._add(before, -1)
        elif len(self._used_at) >= self._max_blocks:
            oldest = next(iter(self._used_at))
            self._add(self._used_at.pop(oldest), -1)
        if self._next > self._size:
            self._renumber()
        self._used_at[key] = self._next
        self._add(self._next, 1)
        self._next += 1
        return distance

    def _renumber(self) -> None:
        """Number the uses from 1 again. It happens once in `max_blocks` uses or more seldom."""
        self._tree = [0] * (self._size + 1)
        self._used_at = {key: number for number, key in enumerate(self._used_at, 1)}
        self._next = len(self._used_at) + 1
        for number in range(1, self._next):
            self._add(number, 1)

    def _add(self, at: int, value: int) -> None:
        tree, size = self._tree, self._size
        while at <= size:
            tree[at] += value
            at += at & -at

    def _count_to(self, at: int) -> int:
        tree, count = self._tree, 0
        while at > 0:
            count += tree[at]
            at -= at & -at
        return count

    def _decay(self, now: float) -> None:
        if self._weighed_s is None:
            self._weighed_s = now
        elif now - self._weighed_s >= _HALF_S:
            factor = 0.5 ** min((now - self._weighed_s) / _HALF_S, 60.0)
            self._counts = [count * factor for count in self._counts]
            self._total *= factor
            self._weighed_s = now


def _position(tokens: float) -> float:
    return 0.0 if tokens <= 1 else _PER_OCTAVE * log2(tokens)


def _bucket(tokens: int) -> int:
    return min(int(_position(tokens)), _PER_OCTAVE * _OCTAVES - 1)

"""SimulatedStore: the tiers below a worker's device, as sets of keys with a capacity, a latency and a bandwidth.

A tier evicts the least recently used block. A store that several workers share is one tier object that all of them use.
Transfers of one worker from one tier, or from one peer, follow one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stoker.base.ids import BlockKey
from stoker.sim.calibration import LinkCosts


@dataclass(slots=True, eq=False)
class SimulatedTier:
    """The keys of the blocks in one tier, least recently used first."""

    name: str
    medium: str  # as in KV events: CPU, or another name for disks and shared stores
    capacity_blocks: int
    costs: LinkCosts
    hit_tokens: int = 0
    num_evicted: int = 0
    _keys: dict[BlockKey, None] = field(default_factory=dict)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Note that blocks were read. The beginning of a prompt is used more often than its end."""
        for key in reversed(keys):
            if self._keys.pop(key, self) is None:
                self._keys[key] = None

    def put(self, keys: Sequence[BlockKey]) -> tuple[list[BlockKey], list[BlockKey]]:
        """Add blocks. Return those that are new, and those that were evicted for them."""
        new = [key for key in keys if self._keys.pop(key, self) is not None]
        self._keys.update(dict.fromkeys(keys))
        evicted = []
        while len(self._keys) > self.capacity_blocks:
            oldest = next(iter(self._keys))
            del self._keys[oldest]
            evicted.append(oldest)
        self.num_evicted += len(evicted)
        return new, evicted

    def clear(self) -> None:
        self._keys.clear()


class SimulatedStore:
    """The tiers of one worker, fastest first, and the time of loads from them."""

    def __init__(self, tiers: Sequence[SimulatedTier], block_bytes: int) -> None:
        self.tiers = list(tiers)
        self._block_bytes = block_bytes
        self._free_at_s: dict[str, float] = {}

    def num_worth_loading(self, keys: Sequence[BlockKey], compute_s: float) -> int:
        """Return how many leading blocks the tiers hold and load faster than the `compute_s` of one block."""
        tiers = [tier for tier in self.tiers if self._block_bytes / tier.costs.bytes_per_s <= compute_s]
        if not tiers:
            return 0
        return next((i for i, key in enumerate(keys) if not any(key in tier for tier in tiers)), len(keys))

    def load(self, keys: Sequence[BlockKey], block_tokens: int, now_s: float) -> tuple[int, float]:
        """Read leading blocks. Return how many are there, and when they have arrived."""
        end_s, num_loaded = now_s, 0
        by_tier: dict[str, list[BlockKey]] = {}
        for key in keys:
            tier = next((one for one in self.tiers if key in one), None)
            if tier is None:
                break
            by_tier.setdefault(tier.name, []).append(key)
            num_loaded += 1
        for tier in self.tiers:
            if found := by_tier.get(tier.name):
                tier.touch(found)
                tier.hit_tokens += len(found) * block_tokens
                end_s = max(end_s, self.transfer(tier.name, len(found), tier.costs, now_s))
        return num_loaded, end_s

    def transfer(self, source: str, num_blocks: int, costs: LinkCosts, now_s: float) -> float:
        """Return when `num_blocks` blocks from `source` have arrived, after the transfers before them."""
        start_s = max(now_s, self._free_at_s.get(source, 0.0))
        end_s = start_s + num_blocks * self._block_bytes / costs.bytes_per_s
        self._free_at_s[source] = end_s
        return end_s + costs.latency_s

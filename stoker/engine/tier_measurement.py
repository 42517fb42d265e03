"""Measure the KV tiers of an engine in this process: the latency and the bandwidth of reads."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from stoker.base.ids import BlockKey
from stoker.kv.blocks.transfer import BlockName
from stoker.kv.device.checksum import checksum
from stoker.kv.store.block_io import HostBytes
from stoker.kv.store.buffer_pool import new_buffer
from stoker.kv.store.measured_tier import MeasuredTier

_READ_BYTES = 64 << 20  # of a long read; enough for the bandwidth of an NVMe drive
_MAX_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class TierTimes:
    """A read of n bytes takes `latency_s + n / bytes_per_s`."""

    medium: str  # as in KV events
    latency_s: float
    bytes_per_s: float


def measure_tiers(tiers: Sequence[MeasuredTier], block_bytes: int, repeats: int) -> dict[str, TierTimes]:
    """Write new blocks into each tier, read them back, and remove them. A tier that does not keep them is left out."""
    count = max(2, min(_MAX_BLOCKS, _READ_BYTES // block_bytes))
    buffers = [new_buffer(block_bytes) for _ in range(count)]
    for buffer in buffers:
        buffer[:] = memoryview(os.urandom(block_bytes))
    found = {}
    for tier in tiers:
        times = _measure(tier, buffers, repeats)
        if times is not None:
            found[tier.name] = times
    return found


def _measure(tier: MeasuredTier, buffers: Sequence[HostBytes], repeats: int) -> TierTimes | None:
    names = [BlockName(BlockKey(os.urandom(16)), BlockKey(bytes(16)), ()) for _ in buffers]
    keys = [name.key for name in names]
    taken = tier.backend.write(names, buffers, [checksum(one) for one in buffers])
    try:
        held = taken.index(False) if False in taken else len(taken)
        if held < 2:
            return None
        one_s, all_s = (_read_s(tier, keys[:number], buffers[:number], repeats) for number in (1, held))
    finally:
        tier.backend.drop(keys)
    if one_s is None or all_s is None:
        return None
    block_bytes = buffers[0].nbytes
    block_s = max((all_s - one_s) / (held - 1), 1e-9)
    return TierTimes(tier.backend.medium, max(0.0, one_s - block_s), block_bytes / block_s)


def _read_s(tier: MeasuredTier, keys: Sequence[BlockKey], into: Sequence[HostBytes], repeats: int) -> float | None:
    """Return the median time of a read, or None if the tier has lost blocks. The first read also opens files and
    connections, and is not counted."""
    taken_s = []
    for _ in range(repeats + 1):
        started_s = time.perf_counter()
        right = tier.backend.read(keys, into)
        taken_s.append(time.perf_counter() - started_s)
        if not all(right):
            return None
    return median(taken_s[1:])

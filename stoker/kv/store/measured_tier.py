"""MeasuredTier: a tier with the counters and the measured speed of this worker's use of it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from stoker.base import log as logs
from stoker.base.ids import BlockKey
from stoker.kv.blocks.transfer import BlockName, TierUnavailable
from stoker.kv.device.checksum import checksum
from stoker.kv.store.block_io import HostBytes
from stoker.kv.store.buffer_pool import new_buffer
from stoker.kv.store.speed import Speed
from stoker.kv.store.tiers.tier import Tier

_GUESS_BYTES_PER_S = 1e9
_PROBES = 5
_WARN_EVERY_S = 10.0
_MEASURE_AGAIN_S = 30.0

log = logs.EventLog("kv")


@dataclass(slots=True)
class TierCounters:
    """Counters since this process started."""

    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    write_s: float = 0.0
    declined: int = 0
    errors: int = 0


@dataclass(slots=True, eq=False)
class MeasuredTier:
    """Wraps a tier and measures every call. The only error that it raises is TierUnavailable."""

    name: str
    backend: Tier
    counters: TierCounters = field(default_factory=TierCounters)
    speed: Speed = field(default_factory=lambda: Speed(_GUESS_BYTES_PER_S))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _warned_s: float = -_WARN_EVERY_S
    _measured_s: float = -_MEASURE_AGAIN_S
    _measuring: threading.Thread | None = None

    def find(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Return which blocks are in the tier. A tier that cannot answer counts as empty."""
        try:
            return self.backend.find(keys)
        except TierUnavailable as error:
            self._note_lost(error)
            return [False] * len(keys)

    def read(self, keys: Sequence[BlockKey], into: Sequence[HostBytes]) -> list[bool]:
        started_s = time.monotonic()
        try:
            right = self.backend.read(keys, into)
        except TierUnavailable as error:
            self.speed.failed(time.monotonic() - started_s)
            self._note_lost(error)
            raise
        seconds, hits = time.monotonic() - started_s, sum(right)
        num_bytes = hits * (into[0].nbytes if into else 0)
        with self._lock:
            self.speed.observe(num_bytes, seconds)
            self.counters.hits += hits
            self.counters.misses += len(right) - hits
            self.counters.read_bytes += num_bytes
            self.counters.read_s += seconds
        return right

    def write(self, names: Sequence[BlockName], data: Sequence[HostBytes], checksums: Sequence[int]) -> list[bool]:
        started_s = time.monotonic()
        try:
            taken = self.backend.write(names, data, checksums)
        except TierUnavailable as error:
            self.counters.declined += len(names)
            self._note_lost(error)
            raise
        with self._lock:
            self.counters.written_bytes += sum(
                buffer.nbytes for buffer, is_there in zip(data, taken, strict=True) if is_there
            )
            self.counters.declined += taken.count(False)
            self.counters.write_s += time.monotonic() - started_s
        return taken

    def catch_up(self) -> None:
        try:
            self.backend.catch_up()
        except TierUnavailable as error:
            self._note_lost(error)

    def measure(self, block_bytes: int) -> None:
        """Measure the speed by writing one block and reading it back, before the first decision relies on it."""
        self._measured_s = time.monotonic()
        name = BlockName(BlockKey(os.urandom(16)), BlockKey(bytes(16)), ())
        data = new_buffer(block_bytes)
        try:
            if not self.backend.write([name], [data], [checksum(data)])[0]:
                # The tier declined the block, for example because it is full. The next load measures the read speed.
                with self._lock:
                    self.speed.forget()
                return
            self.backend.read([name.key], [data])  # the first read also opens connections and files
            taken_s = []
            for _ in range(_PROBES):
                started_s = time.monotonic()
                if self.backend.read([name.key], [data])[0]:
                    taken_s.append(time.monotonic() - started_s)
            if taken_s:  # Other load on the machine can only make a read slower, so the fastest one counts.
                with self._lock:
                    self.speed.replace(block_bytes, min(taken_s))
            self.backend.drop([name.key])
        except TierUnavailable as error:
            self._note_lost(error)

    def measure_again(self, block_bytes: int) -> None:
        """Measure again after half a minute without a measurement. A tier that was too slow is not read, and would stay
        so without it. Runs on a thread of its own, because the tier may hang."""
        if time.monotonic() - self._measured_s < _MEASURE_AGAIN_S:
            return
        if self._measuring is None or not self._measuring.is_alive():
            name = f"kv-measure-{self.name}"
            self._measuring = threading.Thread(target=self.measure, args=(block_bytes,), name=name, daemon=True)
            self._measuring.start()

    def record_timeout(self, num_blocks: int, seconds: float) -> None:
        """Count blocks that did not arrive within `seconds` as misses, and lower the measured speed."""
        with self._lock:
            self.speed.failed(seconds)
            self.counters.misses += num_blocks
            self.counters.errors += 1

    def _note_lost(self, lost: TierUnavailable) -> None:
        """Count the error, and log it at most every ten seconds."""
        self.counters.errors += 1
        now = time.monotonic()
        if now - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = now
            log.warning("kv_tier_unavailable", tier=self.name, reason=lost.message, errors=self.counters.errors)


def first_holders(tiers: Sequence[MeasuredTier], keys: Sequence[BlockKey]) -> list[MeasuredTier | None]:
    """For each block, return the nearest tier that has it."""
    holders: list[MeasuredTier | None] = [None] * len(keys)
    missing = list(range(len(keys)))
    for tier in tiers:
        if not missing:
            break
        found = tier.find([keys[i] for i in missing])
        for i, is_there in zip(missing, found, strict=True):
            if is_there:
                holders[i] = tier
        missing = [i for i in missing if holders[i] is None]
    return holders

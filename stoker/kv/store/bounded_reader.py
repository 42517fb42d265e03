"""BoundedReader: reads blocks into buffers from tiers that may hang, and abandons a read that takes too long."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from stoker.base.ids import BlockKey
from stoker.kv.blocks.transfer import TierUnavailable
from stoker.kv.store.block_io import HostBytes
from stoker.kv.store.buffer_pool import BufferPool
from stoker.kv.store.measured_tier import MeasuredTier

_READERS = 4  # threads per tier


class BoundedReader:
    """Reads with a deadline."""

    def __init__(self, tiers: Sequence[MeasuredTier], buffers: BufferPool) -> None:
        self._buffers = buffers
        # Each tier has its own threads, so that a tier that hangs blocks only its own reads.
        self._readers = {
            tier: ThreadPoolExecutor(_READERS, thread_name_prefix=f"kv-read-{tier.name}") for tier in tiers
        }

    def read(self, tier: MeasuredTier, keys: Sequence[BlockKey], until_s: float) -> tuple[list[HostBytes], list[bool]]:
        """Read blocks, and return the buffers with whether each holds its block. The caller gives the buffers back.
        Raises TierUnavailable if the blocks are not there at `until_s` (monotonic)."""
        buffers = [self._buffers.take_or_allocate() for _ in keys]
        started_s = time.monotonic()
        try:
            reading: Future[list[bool]] = self._readers[tier].submit(tier.read, keys, buffers)
        except RuntimeError:  # the executor is shut down
            raise TierUnavailable("the store is closed") from None
        try:
            return buffers, reading.result(timeout=max(0.0, until_s - started_s))
        except TimeoutError:
            tier.record_timeout(len(keys), time.monotonic() - started_s)
            reading.cancel()  # a read that has not started yet is not needed any more
            reading.add_done_callback(lambda done: self._read_abandoned(done, buffers))
            raise TierUnavailable(f"{tier.name}: {len(keys)} blocks did not arrive in time") from None
        except TierUnavailable:
            self._buffers.abandon(buffers)
            raise

    def close(self) -> None:
        for readers in self._readers.values():
            readers.shutdown(wait=False, cancel_futures=True)

    def _read_abandoned(self, reading: Future[list[bool]], buffers: list[HostBytes]) -> None:
        if reading.cancelled() or reading.exception() is None:
            self._buffers.give_back(buffers)
        else:
            self._buffers.abandon(buffers)

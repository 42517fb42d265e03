"""BoundedReader: reads blocks from tiers that may hang, into buffers, and leaves a read behind that takes too long."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from stoker.base.ids import BlockKey
from stoker.kv.blocks.transfer import TierUnavailable
from stoker.kv.store.block_io import HostBytes
from stoker.kv.store.buffer_pool import BufferPool
from stoker.kv.store.measured_tier import MeasuredTier

_READERS = 4  # of each tier


class BoundedReader:
    def __init__(self, tiers: Sequence[MeasuredTier], buffers: BufferPool) -> None:
        self._buffers = buffers
        # Of each tier its own: one that hangs keeps its readers, and nobody else's.
        self._readers = {
            tier: ThreadPoolExecutor(_READERS, thread_name_prefix=f"kv-read-{tier.name}") for tier in tiers
        }

    def read(self, tier: MeasuredTier, keys: Sequence[BlockKey], until_s: float) -> tuple[list[HostBytes], list[bool]]:
        """BufferPool, which the caller gives back, and whether each holds its block. TierUnavailable: not by then (monotonic)."""
        buffers = [self._buffers.obtain() for _ in keys]
        started_s = time.monotonic()
        try:
            reading: Future[list[bool]] = self._readers[tier].submit(tier.read, keys, buffers)
        except RuntimeError:  # the threads are shut down
            raise TierUnavailable("the store is closed") from None
        try:
            return buffers, reading.result(timeout=max(0.0, until_s - started_s))
        except TimeoutError:
            tier.late(len(keys), time.monotonic() - started_s)
            reading.cancel()  # if it waits behind others that hang, nobody wants it any more
            reading.add_done_callback(lambda done: self._left_behind(done, buffers))
            raise TierUnavailable(f"{tier.name}: {len(keys)} blocks did not come in time") from None
        except TierUnavailable:
            self._buffers.lose(buffers)
            raise

    def close(self) -> None:
        for readers in self._readers.values():
            readers.shutdown(wait=False, cancel_futures=True)

    def _left_behind(self, reading: Future[list[bool]], buffers: list[HostBytes]) -> None:
        if reading.cancelled() or reading.exception() is None:
            self._buffers.give_back(buffers)
        else:
            self._buffers.lose(buffers)

"""Mooncake's Transfer Engine, alone: no store, no master, no metadata server. "mooncake" is its TCP; "mooncake:rdma" and
"mooncake:rdma:mlx5_0" choose another protocol and device.

Both sides register their pools; the side that pulls reads the peer's memory straight into its own blocks. The engine has no
authentication: whoever reaches its port can read registered memory, so that it is used only where the settings name it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import chain
from typing import Any

from stoker.base.ids import BlockId
from stoker.kv.block_bytes import BeforeWrite, CudaSink, Sink, source_of
from stoker.kv.device import DeviceKv
from stoker.kv.layout import KvLayout, Part
from stoker.kv.transfer import PeerUnavailable
from stoker.kv.transports.contract import TRANSPORTS, OneSidedLink

_CHECKED_BYTES = 8 << 20  # at one time: still in the cache
# Of one request, where a block is one run. The engine's few connections take a request each: larger ones would all end at the
# same time, and what they brought is then summed up while the wire has nothing to do.
_REQUEST_BYTES = 2 << 20


@TRANSPORTS.register("mooncake")
class MooncakeTransport:
    def __init__(self, argument: str, host: str) -> None:
        protocol, _, self._device = argument.partition(":")
        self._protocol = protocol or "tcp"
        self._host = host
        self._lock = threading.Lock()
        self._engine: Any = None
        self._registered: int | None = None

    def offer(self, kv: DeviceKv) -> dict[str, Any]:
        engine = self._start(kv)
        segment = f"{self._host}:{engine.get_rpc_port()}"
        return {
            "protocol": self._protocol, "segment": segment, "base": kv.blocks.data_ptr(), "num_blocks": kv.num_blocks,
        }  # fmt: skip

    def open(self, offer: dict[str, Any], peer: KvLayout, kv: DeviceKv, before_write: BeforeWrite) -> MooncakeLink:
        if offer.get("protocol") != self._protocol:
            raise PeerUnavailable(f"protocol: {self._protocol} here, {offer.get('protocol')} there")
        try:
            segment, base, num_blocks = str(offer["segment"]), int(offer["base"]), int(offer["num_blocks"])
        except (KeyError, TypeError, ValueError) as wrong:
            raise PeerUnavailable(f"an offer without its parts: {wrong!r}") from wrong
        return MooncakeLink(self._start(kv), segment, base, num_blocks, peer, kv)

    def close(self) -> None:
        with self._lock:
            if self._engine is not None and self._registered is not None:
                self._engine.unregister_memory(self._registered)
            self._engine = None

    def _start(self, kv: DeviceKv) -> Any:
        """Once: it takes a moment, and threads of its own."""
        with self._lock:
            if self._engine is not None:
                return self._engine
            try:
                from mooncake.engine import TransferEngine
            except ImportError as absent:
                raise PeerUnavailable(f"mooncake: {absent}") from absent
            engine = TransferEngine()
            status = engine.initialize(self._host, "P2PHANDSHAKE", self._protocol, self._device)
            if status:
                raise PeerUnavailable(f"mooncake: initialize({self._host}, {self._protocol}) gave {status}")
            base = kv.blocks.data_ptr()
            status = engine.register_memory(base, kv.blocks.nbytes)
            if status:
                raise PeerUnavailable(f"mooncake: registering {kv.blocks.nbytes} bytes gave {status}")
            self._engine, self._registered = engine, base
            return engine


class MooncakeLink(OneSidedLink):
    batch_bytes = (32 << 20, 128 << 20)

    def __init__(
        self,
        engine: Any,
        segment: str,
        base: int,
        num_blocks: int,
        peer: KvLayout,
        kv: DeviceKv,
    ) -> None:
        super().__init__(peer)
        self._engine = engine
        self._segment = segment
        self._base = base
        self._num_blocks = num_blocks
        self._kv = kv
        self._arrived = source_of(kv)

    def fits(self, sink: Sink) -> bool:
        return sink.into is not None  # other memory is not registered

    def copy(self, blocks: Sequence[BlockId], part: Part, sums: Sequence[int], sink: Sink, first: int) -> list[bool]:
        assert sink.into is not None
        if max(blocks) >= self._num_blocks:
            raise PeerUnavailable(f"block {max(blocks)} of a peer that has {self._num_blocks}")
        if isinstance(sink, CudaSink):
            sink.stream.synchronize()  # the engine knows no streams
        into = sink.into[first : first + len(blocks)]
        step = max(1, _CHECKED_BYTES // part.total_bytes)
        starts = range(0, len(blocks), step)
        # All are on the wire at once, and each is summed up when it has come: the wire is never idle, nor is the cache cold.
        jobs = [self._start(blocks[at : at + step], part, into[at : at + step], sink.part) for at in starts]
        found: list[int] = []
        failed = 0
        for at, job in zip(starts, jobs, strict=True):
            status = self._engine.get_batch_transfer_status([job]) if job > 0 else job or -1
            failed = failed or status
            if not failed:
                found += self._arrived.checksums(into[at : at + step], sink.part)
        if failed:
            raise PeerUnavailable(f"mooncake: reading {len(blocks)} blocks of {self._segment} gave {failed}")
        return [mine == expected for mine, expected in zip(found, sums, strict=True)]

    def _start(self, blocks: Sequence[BlockId], part: Part, into: Sequence[BlockId], our_part: Part) -> int:
        # The same bytes may be one run here and many there: both are cut as the finer of the two.
        count = max(part.count, our_part.count)
        if count == 1 and part.total_bytes % _REQUEST_BYTES == 0:
            count = part.total_bytes // _REQUEST_BYTES
        theirs = _addresses(self._base, self._peer.block_bytes, blocks, part, count)
        ours = _addresses(self._kv.blocks.data_ptr(), self._kv.layout.block_bytes, into, our_part, count)
        lengths = [part.total_bytes // count] * len(ours)
        job: int = self._engine.batch_transfer_async_read(self._segment, ours, theirs, lengths)
        return job


def _addresses(base: int, block_bytes: int, blocks: Sequence[BlockId], part: Part, count: int) -> list[int]:
    step = part.stride if part.count == count else part.total_bytes // count
    starts = (base + block * block_bytes + part.offset for block in blocks)
    return list(chain.from_iterable(range(start, start + count * step, step) for start in starts))

"""Mooncake's Transfer Engine alone, without store, master or metadata server. "mooncake" uses its TCP. "mooncake:rdma"
and "mooncake:rdma:mlx5_0" choose another protocol and device.

Both sides register their pools, and the side that pulls reads the peer's memory directly into its own blocks. The
engine has no authentication: every process that reaches its port can read registered memory. So it is used only if the
settings name it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from itertools import accumulate, chain, islice, pairwise
from typing import Any

from stoker.base.ids import BlockId
from stoker.kv.blocks.layout import BlockSlice, KvLayout
from stoker.kv.blocks.transfer import PeerUnavailable
from stoker.kv.device.device_kv import SetKv
from stoker.kv.mooncake.transfer_engine import REQUEST_BYTES, RemoteRanges, configure_environment, read_in_order
from stoker.kv.peer.block_bytes import BeforeWrite, BlockSink, CudaSink, source_of
from stoker.kv.peer.transports.transport import TRANSPORTS, OneSidedLink

_CHECKED_BYTES = 2 << 20  # checksummed at one time, while the bytes are still in the CPU cache
_CHECKED_ON_GPU_BYTES = 8 << 20  # larger on a GPU, where each one is a kernel launch


@TRANSPORTS.register("mooncake")
class MooncakeTransport:
    def __init__(self, argument: str, host: str) -> None:
        protocol, _, self._device = argument.partition(":")
        self._protocol = protocol or "tcp"
        self._host = host
        self._lock = threading.Lock()
        self._engine: Any = None
        self._registered: set[int] = set()  # addresses of the pools, one for each KV set

    def offer(self, kv: SetKv) -> dict[str, Any]:
        engine = self._start(kv)
        segment = f"{self._host}:{engine.get_rpc_port()}"
        return {
            "protocol": self._protocol, "segment": segment, "base": kv.blocks.data_ptr(), "num_blocks": kv.num_blocks,
        }  # fmt: skip

    def open(self, offer: dict[str, Any], peer: KvLayout, kv: SetKv, before_write: BeforeWrite) -> MooncakeLink:
        if offer.get("protocol") != self._protocol:
            raise PeerUnavailable(f"protocol: {self._protocol} here, {offer.get('protocol')} there")
        try:
            segment, base, num_blocks = str(offer["segment"]), int(offer["base"]), int(offer["num_blocks"])
        except (KeyError, TypeError, ValueError) as error:
            raise PeerUnavailable(f"an offer with missing fields: {error!r}") from error
        return MooncakeLink(self._start(kv), segment, base, num_blocks, peer, kv)

    def close(self) -> None:
        with self._lock:
            for base in self._registered:
                self._engine.unregister_memory(base)
            self._engine, self._registered = None, set()

    def _start(self, kv: SetKv) -> Any:
        """Start the engine once, because it takes a moment and creates threads, and register each pool once."""
        with self._lock:
            engine = self._engine or self._new_engine()
            base = kv.blocks.data_ptr()
            if base not in self._registered:
                status = engine.register_memory(base, kv.blocks.nbytes)
                if status:
                    raise PeerUnavailable(f"mooncake: registering {kv.blocks.nbytes} bytes returned {status}")
                self._registered.add(base)
            self._engine = engine
            return engine

    def _new_engine(self) -> Any:
        configure_environment()
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise PeerUnavailable(f"mooncake: {error}") from error
        engine = TransferEngine()
        status = engine.initialize(self._host, "P2PHANDSHAKE", self._protocol, self._device)
        if status:
            raise PeerUnavailable(f"mooncake: initialize({self._host}, {self._protocol}) returned {status}")
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
        kv: SetKv,
    ) -> None:
        super().__init__(peer)
        self._engine = engine
        self._segment = segment
        self._base = base
        self._num_blocks = num_blocks
        self._kv = kv
        self._arrived = source_of(kv)

    def supports(self, sink: BlockSink) -> bool:
        return sink.into is not None  # other memory is not registered

    def copy(
        self, blocks: Sequence[BlockId], part: BlockSlice, expected: Sequence[int], sink: BlockSink, first: int
    ) -> list[bool]:
        assert sink.into is not None
        if max(blocks) >= self._num_blocks:
            raise PeerUnavailable(f"block {max(blocks)} of a peer that has {self._num_blocks}")
        checked_bytes = _CHECKED_BYTES
        if isinstance(sink, CudaSink):
            sink.stream.synchronize()  # the engine does not know CUDA streams
            checked_bytes = _CHECKED_ON_GPU_BYTES
        into = sink.into[first : first + len(blocks)]
        runs = [self._runs(block, part, own, sink.part) for block, own in zip(blocks, into, strict=True)]
        step = max(1, checked_bytes // part.total_bytes)
        checksums: list[int] = []
        # The next blocks are in flight while these are checksummed, and their bytes are still in the CPU cache.
        with closing(read_in_order(self._engine, chain.from_iterable(runs))) as reads:
            for i in range(0, len(blocks), step):
                if not all(islice(reads, sum(map(len, runs[i : i + step])))):
                    raise PeerUnavailable(f"mooncake: reading {len(blocks)} blocks of {self._segment} failed")
                checksums += self._arrived.checksums(into[i : i + step], sink.part)
        return [actual == wanted for actual, wanted in zip(checksums, expected, strict=True)]

    def _runs(self, block: BlockId, part: BlockSlice, into: BlockId, our_part: BlockSlice) -> list[RemoteRanges]:
        """Return the reads for one block: one run in several reads, or many runs in one read. The same bytes may be one
        run on one side and many on the other; both are cut where either of them is."""
        lengths = _common_lengths(part, our_part)
        is_one = len(lengths) == 1
        if is_one and part.total_bytes % REQUEST_BYTES == 0:
            lengths = [REQUEST_BYTES] * (part.total_bytes // REQUEST_BYTES)
        theirs = _addresses(self._base + block * self._peer.block_bytes, part, lengths)
        ours = _addresses(self._kv.blocks.data_ptr() + into * self._kv.layout.block_bytes, our_part, lengths)
        if not is_one:
            return [RemoteRanges(self._segment, ours, theirs, lengths)]
        return [
            RemoteRanges(self._segment, [local], [remote], [length])
            for local, remote, length in zip(ours, theirs, lengths, strict=True)
        ]


def _lengths(part: BlockSlice) -> list[int]:
    return [runs.num_bytes for runs in part.runs for _ in range(runs.count)]


def _common_lengths(part: BlockSlice, other: BlockSlice) -> list[int]:
    """Return the lengths of the pieces if the bytes are cut at the borders of both slices' runs."""
    ends = sorted({*accumulate(_lengths(part)), *accumulate(_lengths(other))})
    return [end - begin for begin, end in pairwise([0, *ends])]


def _addresses(block: int, part: BlockSlice, lengths: Sequence[int]) -> list[int]:
    """Return the address of each piece. No piece crosses the end of a run."""
    addresses: list[int] = []
    pieces = iter(lengths)
    for runs in part.runs:
        for number in range(runs.count):
            at, end = 0, runs.num_bytes
            while at < end:
                addresses.append(block + runs.offset + number * runs.stride + at)
                at += next(pieces)
    return addresses

"""CUDA IPC: a worker of the same machine opens the peer's pool and copies from GPU to GPU.

The handle is opened once per peer. Everything runs on the sink's stream, which waits for work that still uses the
blocks. Checksums are computed on the GPU that received the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stoker.base.ids import BlockId
from stoker.kv.blocks.layout import BlockSlice, KvLayout
from stoker.kv.blocks.transfer import PeerUnavailable
from stoker.kv.device.checksum import tensor_checksums
from stoker.kv.device.device_kv import SetKv
from stoker.kv.peer.block_bytes import BeforeWrite, BlockSink, CudaSink, DevicePool
from stoker.kv.peer.transports.transport import TRANSPORTS, OneSidedLink

# The fields of torch's description of shared memory, in its order. The device number is not among them, because each
# process has its own numbering.
_BYTES = ("handle", "counter_handle", "event_handle")
_PARTS = ("handle", "num_bytes", "offset", "counter_handle", "counter_offset", "event_handle", "event_needed")


@TRANSPORTS.register("cuda_ipc")
class CudaIpcTransport:
    def __init__(self, argument: str, host: str) -> None:
        pass

    def offer(self, kv: SetKv) -> dict[str, Any]:
        if not kv.blocks.is_cuda:
            raise PeerUnavailable(f"the pool is on {kv.blocks.device}")
        # Shared again for each peer: torch counts the processes that opened it, with a counter per peer.
        _device, *parts = kv.blocks.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        described = dict(zip(_PARTS, parts, strict=True))
        for name in _BYTES:
            described[name] = described[name].hex()
        first = kv.blocks.storage_offset() * kv.blocks.element_size()
        return described | {"uuid": _uuid(kv.blocks.device), "first": first, "pool_bytes": kv.blocks.nbytes}

    def open(self, offer: dict[str, Any], peer: KvLayout, kv: SetKv, before_write: BeforeWrite) -> CudaIpcLink:
        if not kv.blocks.is_cuda:
            raise PeerUnavailable(f"the pool is on {kv.blocks.device}")
        uuids = [_uuid(torch.device("cuda", number)) for number in range(torch.cuda.device_count())]
        if offer.get("uuid") not in uuids:
            raise PeerUnavailable(f"GPU {offer.get('uuid')} is not visible here; visible are: {', '.join(uuids)}")
        try:
            parts = [bytes.fromhex(offer[name]) if name in _BYTES else offer[name] for name in _PARTS]
            storage = torch.UntypedStorage._new_shared_cuda(uuids.index(offer["uuid"]), *parts)
            pool = torch.empty(0, dtype=torch.uint8, device=storage.device)
            pool.set_(storage, offer["first"], (offer["pool_bytes"],), (1,))
        except (RuntimeError, KeyError, TypeError, ValueError) as error:
            raise PeerUnavailable(f"the peer's memory cannot be opened: {error!r}") from error
        return CudaIpcLink(peer, pool, kv.blocks.device)

    def close(self) -> None:
        pass


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


class CudaIpcLink(OneSidedLink):
    batch_bytes = (256 << 20, 256 << 20)

    def __init__(self, peer: KvLayout, pool: Tensor, device: torch.device) -> None:
        super().__init__(peer)
        self._pool = pool
        self._device = device
        self._num_blocks = len(pool) // peer.block_bytes

    def supports(self, sink: BlockSink) -> bool:
        return isinstance(sink, CudaSink)

    def copy(
        self, blocks: Sequence[BlockId], part: BlockSlice, expected: Sequence[int], sink: BlockSink, first: int
    ) -> list[bool]:
        assert isinstance(sink, CudaSink)
        if max(blocks) >= self._num_blocks:
            raise PeerUnavailable(f"block {max(blocks)} of a peer that has {self._num_blocks}")
        with torch.cuda.stream(sink.stream):
            data = DevicePool(self._pool, self._peer.block_bytes, part).select(blocks)
            data = data.to(self._device, non_blocking=True)
            checksums = tensor_checksums(data)
            sink.place_device(first, data)
        # CONFIRM follows. It must be sent after all bytes were read.
        sink.stream.synchronize()
        return [actual == wanted for actual, wanted in zip(checksums, expected, strict=True)]

"""Sums between the GPUs of one machine through CUDA IPC: each rank reads the others' memory in one kernel
(kernels/rank_sum.py). Faster than NCCL for the small sums of decoding, in the order of the ranks, and it can be captured in
CUDA graphs.

Not yet run: no machine with several GPUs has been available.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from stoker.kernels.rank_sum import BLOCK, rank_sum_triton
from stoker.parallel.collectives import Collectives, Transfer

_ROOM_VALUES = 512 << 10  # 64 rows of 8,192 values; larger sums are bound by bandwidth, where NCCL is as fast
_HANDLE_BYTES = 4096
_BYTES = (0, 3, 5)  # the parts of torch's description of shared memory that are bytes
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class IpcCollectives:
    """The collectives of `others`, with small sums through shared memory. `control` is the same group on the host."""

    def __init__(self, others: Collectives, control: Collectives, device: torch.device) -> None:
        self._others = others
        self.rank, self.num_ranks = others.rank, others.num_ranks
        num_flags = _ROOM_VALUES // BLOCK
        # In float32's size, for any dtype: two halves of values, then the flags.
        self._own = torch.zeros(2 * _ROOM_VALUES + num_flags, dtype=torch.int32, device=device)
        self._epochs = torch.zeros(num_flags, dtype=torch.int32, device=device)
        self._opened = [
            self._own if rank == self.rank else _open(handle, self._own)
            for rank, handle in enumerate(_exchange(_share(self._own), control))
        ]
        firsts = [one.data_ptr() for one in self._opened]
        self._buffers = torch.tensor(firsts, device=device)
        self._flags = self._buffers + 2 * _ROOM_VALUES * self._own.element_size()

    def gather(self, x: Tensor) -> list[Tensor]:
        return self._others.gather(x)

    def sum(self, x: Tensor) -> Tensor:
        if x.numel() > _ROOM_VALUES or x.dtype not in _DTYPES:
            return self._others.sum(x)
        # The halves of the buffer begin at the same bytes for every dtype: sums of several dtypes follow each other.
        room = _ROOM_VALUES * self._own.element_size() // x.element_size()
        return rank_sum_triton(x.contiguous(), self._buffers, self._flags, self._epochs, room, self.rank)

    def swap(self, x: Tensor) -> list[Tensor]:
        return self._others.swap(x)

    def send(self, x: Tensor, rank: int) -> Transfer:
        return self._others.send(x, rank)

    def receive(self, into: Tensor, rank: int) -> None:
        self._others.receive(into, rank)

    def close(self) -> None:
        self._others.close()


def _share(x: Tensor) -> bytes:
    """Return the description of a tensor's memory that other processes can open."""
    _device, *parts = x.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    described: list[Any] = [part.hex() if i in _BYTES else part for i, part in enumerate(parts)]
    described.append(str(torch.cuda.get_device_properties(x.device).uuid))
    return json.dumps(described).encode().ljust(_HANDLE_BYTES)


def _exchange(handle: bytes, control: Collectives) -> list[bytes]:
    found = control.gather(torch.frombuffer(bytearray(handle), dtype=torch.uint8))
    return [one.numpy().tobytes() for one in found]


def _open(handle: bytes, like: Tensor) -> Tensor:
    *parts, uuid = json.loads(handle)
    uuids = [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
    parts = [bytes.fromhex(part) if i in _BYTES else part for i, part in enumerate(parts)]
    storage = torch.UntypedStorage._new_shared_cuda(uuids.index(uuid), *parts)
    opened = torch.empty(0, dtype=like.dtype, device=storage.device)
    return opened.set_(storage, 0, like.shape, (1,))

"""Collectives between the GPUs of one machine through CUDA IPC: each rank reads the others' memory in one kernel
(kernels/rank_sum.py, rank_gather.py). Faster than NCCL for the small tensors of decoding, in the order of the ranks, and the
kernels can be captured in CUDA graphs.

Not yet run: no machine with several GPUs has been available.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from stoker.kernels.rank_exchange import ExchangeRoom, buffer_bytes, max_programs
from stoker.kernels.rank_gather import rank_gather_triton
from stoker.kernels.rank_sum import SUMMED_DTYPES, rank_sum_triton
from stoker.parallel.collectives import Collectives, Transfer, sum_in_order

_SMALL_BYTES = 1 << 20  # 64 rows of 8,192 values; larger tensors are bound by bandwidth, where NCCL is as fast
_HANDLE_BYTES = 4096
_BYTES = (0, 3, 5)  # the parts of torch's description of shared memory that are bytes


class IpcCollectives:
    """The collectives of `others`, with small tensors through shared memory. `control` is the same group on the host.

    If ranks share a GPU, all tensors go through shared memory, but those that one rank sends to one other.
    """

    def __init__(self, others: Collectives, control: Collectives, device: torch.device, ranks_per_gpu: int = 1) -> None:
        self._others = others
        self.rank, self.num_ranks = others.rank, others.num_ranks
        self._takes_all = ranks_per_gpu > 1
        programs = max_programs(ranks_per_gpu)
        num_values = buffer_bytes(programs) // 4
        self._own = torch.zeros(num_values + programs, dtype=torch.int32, device=device)  # the slots, then the flags
        torch.cuda.synchronize(device)  # flags are 0 before another rank can read them
        self._opened = [
            self._own if rank == self.rank else _open(handle, self._own)
            for rank, handle in enumerate(_exchange(_share(self._own), control))
        ]
        buffers = torch.tensor([one.data_ptr() for one in self._opened], device=device)
        epochs = torch.zeros(programs, dtype=torch.int32, device=device)
        self._room = ExchangeRoom(buffers, buffers + 4 * num_values, epochs, self.rank, programs)

    def gather(self, x: Tensor) -> list[Tensor]:
        if self._takes(x):
            return list(rank_gather_triton(x, self._room))
        return self._others.gather(x)

    def sum(self, x: Tensor) -> Tensor:
        if not self._takes(x):
            return self._others.sum(x)
        if x.dtype not in SUMMED_DTYPES:
            return sum_in_order(self.gather(x))
        return rank_sum_triton(x.contiguous(), self._room)

    def swap(self, x: Tensor) -> list[Tensor]:
        if not self._takes_all:
            return self._others.swap(x)
        return [sent[self.rank] for sent in self.gather(x)]

    def send(self, x: Tensor, rank: int) -> Transfer:
        return self._others.send(x, rank)

    def receive(self, into: Tensor, rank: int) -> Transfer:
        return self._others.receive(into, rank)

    def close(self) -> None:
        self._others.close()

    def _takes(self, x: Tensor) -> bool:
        return self._takes_all or x.nbytes <= _SMALL_BYTES


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

"""Collectives on GPU tensors that are copied through the host: for ranks that share a GPU, which NCCL refuses.

Copies to the host wait for the current stream, and copies back are in its order. So nothing here can be captured in a CUDA
graph; what captured steps exchange goes through CUDA IPC (ipc.py).
"""

from __future__ import annotations

from torch import Tensor

from stoker.parallel.collectives import Collectives, LateTransfer, Transfer


class HostCollectives:
    """The collectives of `on_host` for tensors on any device."""

    def __init__(self, on_host: Collectives) -> None:
        self._on_host = on_host
        self.rank, self.num_ranks = on_host.rank, on_host.num_ranks

    def gather(self, x: Tensor) -> list[Tensor]:
        return [part.to(x.device) for part in self._on_host.gather(x.cpu())]

    def sum(self, x: Tensor) -> Tensor:
        return self._on_host.sum(x.cpu()).to(x.device)

    def swap(self, x: Tensor) -> list[Tensor]:
        return [part.to(x.device) for part in self._on_host.swap(x.cpu())]

    def send(self, x: Tensor, rank: int) -> Transfer:
        return self._on_host.send(x.cpu(), rank)

    def receive(self, into: Tensor, rank: int) -> Transfer:
        received = into.new_empty(into.shape, device="cpu")
        transfer = self._on_host.receive(received, rank)

        def take() -> None:
            transfer.wait()
            into.copy_(received)

        return LateTransfer(take)

    def close(self) -> None:
        self._on_host.close()

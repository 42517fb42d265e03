"""Collectives between GPUs over NCCL. Not yet run: no machine with several GPUs has been available, and NCCL refuses two
ranks on one GPU.

NCCL adds up in an order of its own, the same on all ranks. So ranks agree with each other, and not bit by bit with virtual
ranks. Its operations can be captured in CUDA graphs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from stoker.parallel.collectives import LateTransfer, Transfer, exchanging
from stoker.parallel.gloo import GlooWorld

dist: Any = torch.distributed  # its compiled classes have no complete type annotations


class NcclWorld:
    """Makes groups of ranks, each with its own communicator, over the rendezvous of `world`."""

    def __init__(self, world: GlooWorld, device: torch.device) -> None:
        self._world, self._device = world, device

    def group(self, name: str, ranks: tuple[int, ...]) -> NcclCollectives:
        return NcclCollectives(
            self._world.store(f"nccl {name}"), ranks.index(self._world.rank), len(ranks), self._device
        )


class NcclCollectives:
    def __init__(self, store: Any, rank: int, num_ranks: int, device: torch.device) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._group = dist.ProcessGroupNCCL(store, rank, num_ranks)
        # The first operation makes the communicator, which must not happen while a graph is captured.
        self.sum(torch.zeros(1, device=device))

    def gather(self, x: Tensor) -> list[Tensor]:
        parts = x.new_empty(self.num_ranks, *x.shape)
        with exchanging():
            self._group._allgather_base(parts, x).wait()
        return list(parts)

    def sum(self, x: Tensor) -> Tensor:
        with exchanging():
            self._group.allreduce([x]).wait()
        return x

    def swap(self, x: Tensor) -> list[Tensor]:
        parts, sent = torch.empty_like(x), x.contiguous()
        with exchanging():
            self._group.alltoall_base(parts, sent, [], []).wait()
        return list(parts)

    def send(self, x: Tensor, rank: int) -> Transfer:
        with exchanging():
            work: Transfer = self._group.send([x], rank, 0)
        return work

    def receive(self, into: Tensor, rank: int) -> Transfer:
        """The stream of this rank waits for the tensor, so it is received when it is needed."""
        return LateTransfer(partial(self._take, into, rank))

    def _take(self, into: Tensor, rank: int) -> None:
        with exchanging():
            self._group.recv([into], rank, 0).wait()

    def close(self) -> None:
        self._group.abort()

"""Collectives between threads of one process: virtual ranks, for tests and for comparing real ranks with.

A rank hands over copies. So what one rank does later with its tensor does not reach the others, as between processes.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from functools import partial

import torch
from torch import Tensor

from stoker.parallel.collectives import ExchangeFailed, LateTransfer, Transfer, exchanging, sum_in_order

_TIMEOUT_S = 60.0  # a rank that fails closes the world, so that this is for bugs only


class ThreadWorld:
    """The virtual ranks of one process."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._parts: dict[tuple[int, ...], dict[int, Tensor]] = defaultdict(dict)
        self._barriers: dict[tuple[int, ...], threading.Barrier] = {}
        self._sent: dict[tuple[int, int], queue.SimpleQueue[Tensor | None]] = defaultdict(queue.SimpleQueue)
        self._lock = threading.Lock()

    def group(self, ranks: tuple[int, ...], rank: int) -> ThreadCollectives:
        """Return the collectives of `rank` within the group `ranks`."""
        with self._lock:
            barrier = self._barriers.setdefault(ranks, threading.Barrier(len(ranks)))
        return ThreadCollectives(self, ranks, rank, barrier)

    def exchange(self, ranks: tuple[int, ...], rank: int, barrier: threading.Barrier, x: Tensor) -> list[Tensor]:
        self._parts[ranks][rank] = x.clone()
        barrier.wait(_TIMEOUT_S)
        found = [self._parts[ranks][other].clone() for other in ranks]
        barrier.wait(_TIMEOUT_S)
        return found

    def box(self, source: int, target: int) -> queue.SimpleQueue[Tensor | None]:
        with self._lock:
            return self._sent[source, target]

    def close(self) -> None:
        for barrier in self._barriers.values():
            barrier.abort()
        for source in range(self.num_ranks):
            for target in range(self.num_ranks):
                self.box(source, target).put(None)


class _Delivered:
    """A transfer that is done."""

    def wait(self) -> None:
        pass


class ThreadCollectives:
    """One virtual rank's side of a group."""

    def __init__(self, world: ThreadWorld, ranks: tuple[int, ...], rank: int, barrier: threading.Barrier) -> None:
        self._world, self._ranks, self._barrier = world, ranks, barrier
        self._me = rank
        self.rank, self.num_ranks = ranks.index(rank), len(ranks)

    def gather(self, x: Tensor) -> list[Tensor]:
        with exchanging():  # a barrier that another rank's error has broken
            return self._world.exchange(self._ranks, self._me, self._barrier, x)

    def sum(self, x: Tensor) -> Tensor:
        return sum_in_order(self.gather(x))

    def swap(self, x: Tensor) -> list[Tensor]:
        return [sent[self.rank] for sent in self.gather(x)]

    def send(self, x: Tensor, rank: int) -> Transfer:
        self._world.box(self._me, self._ranks[rank]).put(x.clone())
        return _Delivered()

    def receive(self, into: Tensor, rank: int) -> Transfer:
        return LateTransfer(partial(self._take, into, rank))

    def _take(self, into: Tensor, rank: int) -> None:
        found = self._world.box(self._ranks[rank], self._me).get(timeout=_TIMEOUT_S)
        if found is None:
            raise ExchangeFailed(f"rank {self._ranks[rank]} is closed")
        with torch.no_grad():
            into.copy_(found)

    def close(self) -> None:
        self._world.close()

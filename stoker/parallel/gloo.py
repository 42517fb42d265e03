"""Collectives between processes over gloo: for CPUs, for GPUs where NCCL refuses (two ranks on one GPU), and for the few
numbers that ranks compare at their start.

The process group is an object of its own, not torch's global one: a process may be a rank of several groups.
"""

from __future__ import annotations

import ctypes
import queue
import socket
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from stoker.parallel.collectives import Transfer, exchanging, sum_in_order

_POLL_S = 0.5  # how often a waiting rank looks whether its group was closed
_TIMED_OUT = "Operation timed out"  # what gloo says at the end of a wait for a collective

dist: Any = torch.distributed  # its compiled classes have no complete type annotations


class GlooWorld:
    """The rendezvous of all ranks of an engine. Rank 0 listens; the others connect to it."""

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        listener: socket.socket | None = None,
        interface: str | None = None,
    ) -> None:
        """Rank 0 has the `listener` at this address; a server that opens its own would listen on all interfaces. A rank that
        does not arrive within `timeout_s` is an error. `interface` is this machine's address for connections between ranks; by
        default it is `host`."""
        self.rank, self.num_ranks = rank, num_ranks
        self._interface, self._timeout = interface or host, timedelta(seconds=timeout_s)
        # The store closes the file descriptor when it ends.
        listening = {} if listener is None else {"is_master": True, "master_listen_fd": listener.detach()}
        self._store = dist.TCPStore(
            host, port, None, timeout=self._timeout, wait_for_workers=False, use_libuv=True, **listening
        )

    def store(self, name: str) -> Any:
        """Return a key-value store that all ranks share, with names of its own."""
        return dist.PrefixStore(name, self._store)

    def group(self, name: str, ranks: tuple[int, ...]) -> GlooCollectives:
        """Return this rank's side of a group. All of its ranks must call this."""
        return GlooCollectives(self.store(name), ranks.index(self.rank), len(ranks), self._interface, self._timeout)


class GlooCollectives:
    def __init__(self, store: Any, rank: int, num_ranks: int, interface: str, timeout: timedelta) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=interface)]
        options._timeout = timeout
        self._group = dist.ProcessGroupGloo(store, rank, num_ranks, options)
        # A step may take minutes on a CPU. A rank that dies or hangs is noticed by its heartbeat (rank_watch.py), and its end
        # closes the connections.
        self._group._set_default_timeout(timedelta(days=1))
        self._is_closed = False
        self._num_moving = 0  # transfers that were not waited for
        self._waits = _WaitThread()

    def gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.num_ranks)]
        with exchanging():
            self._finish_collective(self._group.allgather([parts], [x]))
        return parts

    def sum(self, x: Tensor) -> Tensor:
        return sum_in_order(self.gather(x.contiguous()))

    def swap(self, x: Tensor) -> list[Tensor]:
        parts, sent = torch.empty_like(x), x.contiguous()
        with exchanging():
            self._finish_collective(self._group.alltoall_base(parts, sent, [], []))
        return list(parts)

    def send(self, x: Tensor, rank: int) -> Transfer:
        with exchanging():
            return self._moving(x, self._group.send([x], rank, 0))

    def receive(self, into: Tensor, rank: int) -> Transfer:
        with exchanging():
            return self._moving(into, self._group.recv([into], rank, 0))

    def _moving(self, x: Tensor, work: Any) -> _Moving:
        self._num_moving += 1
        return _Moving(x, work, self)

    def finish(self, transfer: Any) -> None:
        """Wait for a tensor that is sent or received, or until the group is closed.

        gloo does not always notice that a rank has ended. Its own wait with a timeout would close the connection at its end, so
        another thread waits without one.
        """
        waiting = self._waits.start(transfer)
        while not waiting.done.wait(_POLL_S):
            self._check_open()
        self._num_moving -= 1
        if waiting.error is not None:
            raise waiting.error

    def _finish_collective(self, work: Any) -> None:
        """Wait for a collective, or until the group is closed. These may be waited for several times."""
        while True:
            try:
                work.wait(timedelta(seconds=_POLL_S))
                return
            except RuntimeError as error:
                if _TIMED_OUT not in str(error):
                    raise
                if work.is_completed():  # it may have ended after the timeout: this returns or raises its own error
                    work.wait()
                    return
                self._check_open()

    def _check_open(self) -> None:
        if self._is_closed:
            self._keep()
            raise RuntimeError("the group was closed")

    def _keep(self) -> None:
        """Keep the group for ever: its destructor would wait for an operation that may never end."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._num_moving:
                self._keep()
            self._waits.close()
            self._group.abort()


class _TransferWait:
    """A transfer that is waited for."""

    def __init__(self, work: Any) -> None:
        self.work = work
        self.done = threading.Event()
        self.error: RuntimeError | None = None


class _WaitThread:
    """Waits for transfers, one after the other. The thread is started with the first one."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_TransferWait | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, work: Any) -> _TransferWait:
        if self._thread is None:
            self._thread = threading.Thread(target=_wait_for_all, args=(self._queue,), name="gloo-wait", daemon=True)
            self._thread.start()
        waiting = _TransferWait(work)
        self._queue.put(waiting)
        return waiting

    def close(self) -> None:
        self._queue.put(None)


def _wait_for_all(waits: queue.SimpleQueue[_TransferWait | None]) -> None:
    while (waiting := waits.get()) is not None:
        try:
            waiting.work.wait()
        except RuntimeError as error:
            waiting.error = error
        waiting.done.set()


class _Moving:
    """A tensor that is being sent or received. It is kept until the transfer is done."""

    def __init__(self, x: Tensor, work: Any, group: GlooCollectives) -> None:
        self._tensor, self._work, self._group = x, work, group

    def wait(self) -> None:
        with exchanging():
            self._group.finish(self._work)

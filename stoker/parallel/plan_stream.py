"""Plans over TCP, to a rank on another machine.

A small frame is sent at once if the connection has room for it. Others wait in a bounded queue for a thread, so that a slow
network or a rank that is behind delays neither rank 0 nor the other ranks.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable

from stoker.base.errors import StokerError
from stoker.parallel.plan_transport import PlansStuck
from stoker.parallel.rank_link import Kind, LinkEnd, LinkMessage, RankLink

_SMALL_BYTES = 8 << 10  # a connection that is writable has room for this
_QUEUE_BYTES = 16 << 20


class PlanStream:
    """Rank 0's side, for one rank. A frame longer than the queue is sent alone."""

    def __init__(self, link: RankLink, rank: int, deadline_s: float, max_bytes: int = _QUEUE_BYTES) -> None:
        self._link, self._rank, self._deadline_s, self._max_bytes = link, rank, deadline_s, max_bytes
        self._queue: deque[bytes] = deque()
        self._num_bytes = 0  # in the queue, or being sent by the thread
        self._changed = threading.Condition()
        self._error: LinkEnd | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"plans-{rank}", daemon=True)
        self._thread.start()

    def send(self, frame: bytes) -> None:
        with self._changed:
            self._check()
            if not self._num_bytes and len(frame) <= _SMALL_BYTES and self._has_room():
                self._send(frame)
                return
            self._wait_for_queue(len(frame))
            self._queue.append(frame)
            self._num_bytes += len(frame)
            self._changed.notify_all()

    def close(self) -> None:
        """Drop what is queued. The link must be closed too, which ends a send that waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise PlansStuck(f"rank {self._rank} cannot be reached: {self._error.message}") from self._error

    def _has_room(self) -> bool:
        return self._link.fileno() >= 0 and bool(select.select([], [self._link], [], 0)[1])

    def _wait_for_queue(self, count: int) -> None:
        until_s = time.monotonic() + self._deadline_s
        while self._num_bytes and self._num_bytes + count > self._max_bytes:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise PlansStuck(
                    f"rank {self._rank} has not read {self._num_bytes:,} bytes of plans for {self._deadline_s:g} s"
                )
            self._changed.wait(left_s)
            self._check()

    def _send(self, frame: bytes) -> None:
        try:
            self._link.send(LinkMessage(Kind.PLAN, frame=frame))
        except LinkEnd as error:
            self._error = error
            self._check()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._is_closed:
                    self._changed.wait()
                if self._is_closed or self._error is not None:
                    return
                frame = self._queue.popleft()
            error: LinkEnd | None = None
            try:
                self._link.send(LinkMessage(Kind.PLAN, frame=frame))
            except LinkEnd as end:
                error = end
            with self._changed:
                self._num_bytes -= len(frame)
                self._error = self._error or error
                self._changed.notify_all()


class OrderReader:
    """Reads all messages of rank 0, on the side of the rank. A thread reads all the time, so that a long step neither closes the
    window of the connection nor hides that rank 0 has ended."""

    def __init__(
        self, link: RankLink, on_end: Callable[[StokerError], None], max_bytes: int = 4 * _QUEUE_BYTES
    ) -> None:
        """`on_end` is called on the thread when rank 0 is gone (LinkEnd) or ends this rank (RankDismissed)."""
        self._link, self._on_end, self._max_bytes = link, on_end, max_bytes
        self._queue: deque[LinkMessage] = deque()
        self._num_bytes = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="orders", daemon=True).start()

    def next(self, timeout_s: float | None = None) -> LinkMessage | None:
        """Return the next message, None if there is none in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._queue, timeout_s):
                return None
            message = self._queue.popleft()
            self._num_bytes -= len(message.frame)
            self._changed.notify_all()
            return message

    def _run(self) -> None:
        try:
            while True:
                message = self._link.receive_order()
                with self._changed:
                    self._changed.wait_for(lambda: self._num_bytes < self._max_bytes)
                    self._queue.append(message)
                    self._num_bytes += len(message.frame)
                    self._changed.notify_all()
        except StokerError as error:
            self._on_end(error)


class PlanStreamReader:
    """The plans among the messages of rank 0."""

    def __init__(self, orders: OrderReader) -> None:
        self._orders = orders

    def receive(self, timeout_s: float) -> bytes | None:
        message = self._orders.next(timeout_s)
        if message is None:
            return None
        if message.kind is not Kind.PLAN:
            raise LinkEnd(f"expected a plan of rank 0, got {message.kind.name}")
        return message.frame

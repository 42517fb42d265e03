"""A ring of bytes in shared memory: rank 0 writes frames, the ranks of the same machine read them.

Positions count all bytes since the start, so that the difference of two is what is unread. A frame that is longer than a
part of the ring is written in pieces. A reader sleeps on an eventfd, which counts the pieces that it has not read. Both are
inherited as file descriptors: there are no names to clean up, and the memory is freed with the last process.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import time
from dataclasses import dataclass

from stoker.parallel.plan_transport import PlansStuck

_WORD = struct.Struct("<Q")
_LINE = 64  # a cache line for each position, so that readers do not slow each other down
_POLL_S = 0.0005
_LONGEST_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class RingFiles:
    """The file descriptors of a ring: its memory, and an eventfd per reader."""

    memory: int
    events: tuple[int, ...]

    @classmethod
    def create(cls, num_readers: int) -> RingFiles:
        memory = os.memfd_create("stoker-plans", os.MFD_CLOEXEC)
        flags = os.EFD_SEMAPHORE | os.EFD_CLOEXEC | os.EFD_NONBLOCK
        return cls(memory, tuple(os.eventfd(0, flags) for _ in range(num_readers)))

    def close(self) -> None:
        for fd in (self.memory, *self.events):
            os.close(fd)


class _Ring:
    def __init__(self, memory: int, num_readers: int) -> None:
        self._map = mmap.mmap(memory, os.fstat(memory).st_size)
        self._first = (1 + num_readers) * _LINE
        self._capacity = len(self._map) - self._first

    def _position(self, line: int) -> int:
        return int(_WORD.unpack_from(self._map, line * _LINE)[0])

    def _set_position(self, line: int, value: int) -> None:
        _WORD.pack_into(self._map, line * _LINE, value)

    def _copy_in(self, position: int, data: bytes) -> None:
        at = position % self._capacity
        head = min(len(data), self._capacity - at)
        self._map[self._first + at : self._first + at + head] = data[:head]
        self._map[self._first : self._first + len(data) - head] = data[head:]

    def _copy_out(self, position: int, count: int) -> bytes:
        at = position % self._capacity
        head = min(count, self._capacity - at)
        start = self._first + at
        return self._map[start : start + head] + self._map[self._first : self._first + count - head]


class RingWriter(_Ring):
    """Rank 0's side. `num_bytes` is the size of the ring. A longer frame waits for its readers."""

    def __init__(self, files: RingFiles, num_bytes: int, deadline_s: float) -> None:
        os.ftruncate(files.memory, num_bytes + (1 + len(files.events)) * _LINE)
        super().__init__(files.memory, len(files.events))
        self._events, self._deadline_s = files.events, deadline_s
        self._written = 0

    def send(self, frame: bytes) -> None:
        """Write a frame. Waits for readers that are behind, and raises PlansStuck if one stays behind."""
        size = self._capacity // 4
        for first in range(0, max(1, len(frame)), size):
            self._send_piece(frame[first : first + size], is_last=first + size >= len(frame))

    def _send_piece(self, piece: bytes, *, is_last: bool) -> None:
        count = _WORD.size + len(piece)
        self._wait_for_room(count)
        self._copy_in(self._written, _WORD.pack(2 * len(piece) + is_last) + piece)
        self._written += count
        self._set_position(0, self._written)
        for event in self._events:
            os.eventfd_write(event, 1)

    def _wait_for_room(self, count: int) -> None:
        give_up_s, poll_s = time.monotonic() + self._deadline_s, _POLL_S
        while True:
            read = [self._position(1 + i) for i in range(len(self._events))]
            if self._written + count - min(read, default=self._written) <= self._capacity:
                return
            if time.monotonic() > give_up_s:
                late = read.index(min(read))
                raise PlansStuck(
                    f"reader {late} has not read {self._written - read[late]:,} bytes of plans for {self._deadline_s:g} s"
                )
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)


class RingReader(_Ring):
    """A rank's side. Create it after rank 0 has created its own."""

    def __init__(self, memory: int, event: int, index: int, num_readers: int) -> None:
        super().__init__(memory, num_readers)
        self._event, self._line = event, 1 + index
        self._read = 0
        self._pieces: list[bytes] = []  # of a frame that has not arrived completely

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next frame, None if there is none in time."""
        while (found := self._receive_piece(timeout_s)) is not None:
            piece, is_last = found
            self._pieces.append(piece)
            if is_last:
                frame, self._pieces = b"".join(self._pieces), []
                return frame
        return None

    def _receive_piece(self, timeout_s: float) -> tuple[bytes, bool] | None:
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            if not select.select([self._event], [], [], timeout_s)[0]:
                return None
            os.eventfd_read(self._event)
        (word,) = _WORD.unpack(self._copy_out(self._read, _WORD.size))
        piece = self._copy_out(self._read + _WORD.size, word // 2)
        self._read += _WORD.size + len(piece)
        self._set_position(self._line, self._read)
        return piece, bool(word % 2)

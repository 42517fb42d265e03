"""A ZMQ socket on the event loop. Messages go to a callback, many per wake-up, without a future or task for each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import zmq

_SLICE_S = 0.005  # then other callbacks of the event loop get a turn


class LazyZmqContext:
    """The ZMQ context of all watchers. It is made for the first socket, so a gateway that never started has none to close."""

    def __init__(self) -> None:
        self._made: zmq.Context[zmq.Socket[bytes]] | None = None

    def get(self) -> zmq.Context[zmq.Socket[bytes]]:
        if self._made is None:
            self._made = zmq.Context()
        return self._made

    def close(self) -> None:
        if self._made is not None:
            self._made.term()


class ZmqReader:
    """Owns the socket and calls `on_message` with the frames of each message."""

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.get(zmq.FD))
        self._again: asyncio.Handle | None = None
        self._closed = False
        self._loop.add_reader(self._descriptor, self._drain)
        # The descriptor signals only changes, so read messages that arrived before add_reader().
        self._again = self._loop.call_soon(self._drain)

    def send(self, frames: list[bytes]) -> bool:
        """Send without blocking. Return False if the socket cannot take the message now."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            self._drain_soon()  # sending can consume the descriptor's signal that messages are readable
        return True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)

    def _drain(self) -> None:
        until = time.monotonic() + _SLICE_S
        while not self._closed:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_message(frames)
            if time.monotonic() > until:
                self._drain_soon()
                return

    def _drain_soon(self) -> None:
        if not self._closed:
            if self._again is not None:
                self._again.cancel()
            self._again = self._loop.call_soon(self._drain)

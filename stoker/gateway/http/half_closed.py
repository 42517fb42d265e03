"""Finds out whether a client that closed its sending side still reads.

A client that only half-closed its connection waits for its answer. A client that closed it cancels its request. Both send
the same packet, a FIN. The difference shows when the server sends something: a closed client's kernel replies with a reset.
So something that every client ignores is sent as a probe (`HttpRequest.probe`). Where nothing can be sent, TCP keep-alive
finds a closed client once its kernel has forgotten the connection, which is after a minute on Linux.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

_LOOK_S = 0.25  # between two looks at the socket's error
_LOOKS_PER_PROBE = 20  # so a new probe is sent every 5 s
_KEEPALIVE_S = 5


class HalfClosedProbe:
    """Probes one half-closed connection until `stop()`.

    `probe()` sends what the client ignores. `on_closed()` is called once if the client has closed the connection completely.
    """

    __slots__ = ("_looks", "_loop", "_on_closed", "_probe", "_timer", "_transport")

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        first_s: float,
        probe: Callable[[], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._probe = probe
        self._on_closed = on_closed
        self._looks = 0
        self._keep_alive()
        self._timer = loop.call_later(first_s, self._look)

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        sock = self._transport.get_extra_info("socket")
        try:
            closed = sock is None or bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        except OSError:
            closed = True
        if closed:
            self._on_closed()
            return
        if self._looks % _LOOKS_PER_PROBE == 0:
            self._probe()
        self._looks += 1
        self._timer = self._loop.call_later(_LOOK_S, self._look)

    def _keep_alive(self) -> None:
        sock = self._transport.get_extra_info("socket")
        options = [(socket.SOL_SOCKET, "SO_KEEPALIVE", 1)]
        options += [(socket.IPPROTO_TCP, name, _KEEPALIVE_S) for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL")]
        for level, name, value in options:
            if sock is not None and hasattr(socket, name):
                with contextlib.suppress(OSError):
                    sock.setsockopt(level, getattr(socket, name), value)

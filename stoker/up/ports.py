"""Reserves ports for processes that do not run yet, or are being restarted.

A port that is free now may be taken a moment later. A bound socket that does not listen reserves it: the kernel does not hand it
out as a free port, but lets the part listen on it, because both sockets set SO_REUSEADDR. Another fleet that asks for the same
number would also succeed. Therefore each reserved port is also claimed by an abstract Unix socket name, which the kernel frees when
the process exits.
"""

from __future__ import annotations

import socket
import sys
from typing import Protocol

from stoker.base.errors import ConfigError

_TRIES = 1000


class Ports(Protocol):
    """The source of the planner's ports."""

    def take(self, host: str, port: int) -> int:
        """Reserve this port, or any free one if it is 0. Raise ConfigError if it is taken."""

    def take_after(self, host: str, port: int) -> int:
        """Reserve the first free port above this one."""


class ReservedPorts:
    """Ports that are reserved until `close`."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self._names: list[socket.socket] = []

    def take(self, host: str, port: int) -> int:
        try:
            return self._keep(host, port)
        except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"port {port} of {host} cannot be used: {why}; choose another port") from error

    def take_after(self, host: str, port: int) -> int:
        for candidate in range(port + 1, min(port + _TRIES, 65536)):
            try:
                return self._keep(host, candidate)
            except OSError:
                continue
        return self.take(host, 0)

    def take_or_next(self, host: str, port: int) -> int:
        """Reserve this port, or else the first free one above it. 0: any free one."""
        try:
            return self.take(host, port)
        except ConfigError:
            return self.take_after(host, port)

    def close(self) -> None:
        for one in (*self._sockets, *self._names):
            one.close()
        self._sockets.clear()
        self._names.clear()

    def _keep(self, host: str, port: int) -> int:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        kept = socket.socket(address[0], address[1])
        try:
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind(address[4])
            taken: int = kept.getsockname()[1]
            if any(one.getsockname()[1] == taken for one in self._sockets):
                raise OSError(0, "another process of this fleet has it")
            self._claim(taken)
        except OSError:
            kept.close()
            raise
        self._sockets.append(kept)
        return taken

    def _claim(self, port: int) -> None:
        if sys.platform != "linux":
            return
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0stoker-up-port-{port}")
        except OSError as error:
            name.close()
            raise OSError(error.errno, "another fleet has reserved it") from error
        self._names.append(name)


class PlannedPorts:
    """Port numbers for `stoker up --check`. Nothing is reserved."""

    def __init__(self) -> None:
        self._taken: set[int] = set()

    def take(self, host: str, port: int) -> int:
        if port and port in self._taken:
            raise ConfigError(f"port {port} of {host} cannot be used: another process of this fleet has it")
        self._taken.add(port)
        return port

    def take_after(self, host: str, port: int) -> int:
        return self.take(host, next(one for one in range(port + 1, 1 << 17) if one not in self._taken)) if port else 0

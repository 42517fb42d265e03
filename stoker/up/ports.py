"""Ports that are kept for parts which do not run yet, or not just now.

A port that was found free may be taken a moment later. A socket that is bound and does not listen keeps it: the system
gives it to nobody who asks for any, and lets the part listen there, because both say SO_REUSEADDR. So would another fleet,
which asks for it by its number; what one fleet keeps the others know by a name, which ends with the process that has it.
"""

from __future__ import annotations

import socket
import sys
from typing import Protocol

from stoker.base.errors import ConfigError

_TRIES = 1000


class Ports(Protocol):
    def take(self, host: str, port: int) -> int:
        """This one, or ConfigError; 0 takes any."""

    def take_after(self, host: str, port: int) -> int:
        """The first free one above."""


class KeptPorts:
    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self._names: list[socket.socket] = []

    def take(self, host: str, port: int) -> int:
        try:
            return self._keep(host, port)
        except (OSError, UnicodeError) as error:  # the second: no name of a host looks like that
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"port {port} of {host} cannot be used: {why}; choose another one") from error

    def take_after(self, host: str, port: int) -> int:
        for candidate in range(port + 1, min(port + _TRIES, 65536)):
            try:
                return self._keep(host, candidate)
            except OSError:
                continue
        return self.take(host, 0)

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
                raise OSError(0, "another part of this fleet has it")
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
            raise OSError(error.errno, "another fleet keeps it") from error
        self._names.append(name)


class ImaginedPorts:
    """For looking at a fleet without starting it."""

    def __init__(self) -> None:
        self._taken: set[int] = set()

    def take(self, host: str, port: int) -> int:
        if port and port in self._taken:
            raise ConfigError(f"port {port} of {host} cannot be used: another part of this fleet has it")
        self._taken.add(port)
        return port

    def take_after(self, host: str, port: int) -> int:
        return self.take(host, next(one for one in range(port + 1, 1 << 17) if one not in self._taken)) if port else 0

"""Sockets that are bound to an address and do not listen yet."""

from __future__ import annotations

import socket

from stoker.base.errors import ConfigError


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to this address. Raises ConfigError if that is not possible."""
    return _bound(host, port, socket.SO_REUSEADDR)


def shared_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to a port which several processes share. It gets connections only if it listens."""
    # With SO_REUSEPORT alone, the port could not be one that `stoker up` holds.
    return _bound(host, port, socket.SO_REUSEADDR, socket.SO_REUSEPORT)


def _bound(host: str, port: int, *options: int) -> socket.socket:
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(address[0], address[1])
        try:
            for option in options:
                bound.setsockopt(socket.SOL_SOCKET, option, 1)
            bound.bind(address[4])
        except OSError:
            bound.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot listen on {host}:{port}: {why}; choose another --host or --port") from error
    return bound

"""The open client connections: how many there may be, in total and from one address, and which are closed to make room."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Protocol

from stoker.gateway.http.errors import BadMessage

_MAX_REFUSED = (
    64  # connections beyond a limit that are kept open for a moment, so that their clients can read the error
)
_SITE_BITS = 64  # an IPv6 client usually has a whole /64, so all its addresses count as one

Network = IPv4Network | IPv6Network


class OpenConnection(Protocol):
    """What is known here of a connection."""

    peer: str
    group: str

    def cut(self) -> None: ...


class OpenConnections:
    """Counts connections. The connections keep `refused`, `idle` and `starting` up to date themselves, in order of time."""

    def __init__(self, max_total: int, max_per_address: int, trusted: Sequence[str]) -> None:
        self.refused: dict[OpenConnection, None] = {}  # got an error and will be closed
        self.idle: dict[OpenConnection, None] = {}  # no byte of a request has arrived
        self.starting: dict[OpenConnection, None] = {}  # sends a request head, or a body without credentials
        self._max_total = max_total
        self._max_per_address = max_per_address
        self._groups = AddressGroups(trusted)
        self._num = 0
        self._by_group: dict[str, int] = {}

    def enter(self, connection: OpenConnection) -> BadMessage | None:
        """Add a connection and set its `group`. Return why it must be refused, or None. It may have been cut already.

        When the server is full, one connection is closed: the first of those that were refused, else the one that has been
        idle for the longest time, else the one that has been sending its head, or a body without credentials, for the longest
        time.
        """
        group = connection.group = self._groups.group(connection.peer)
        self._num += 1
        num = self._by_group[group] = self._by_group.get(group, 0) + 1
        if num > self._max_per_address and not self._groups.is_trusted(connection.peer):
            if num > self._max_per_address + _MAX_REFUSED:
                connection.cut()
            limit = self._max_per_address
            return BadMessage(429, f"this address has {num} connections; at most {limit} are allowed; close some")
        if self._num > self._max_total and not self._make_room():
            if self._num > self._max_total + _MAX_REFUSED:
                connection.cut()
            return BadMessage(503, f"the gateway has its maximum of {self._max_total} connections; retry later")
        return None

    def leave(self, connection: OpenConnection) -> None:
        self._num -= 1
        self.refused.pop(connection, None)
        self.idle.pop(connection, None)
        self.starting.pop(connection, None)
        left = self._by_group[connection.group] - 1
        if left:
            self._by_group[connection.group] = left
        else:
            del self._by_group[connection.group]

    def _make_room(self) -> bool:
        for waiting in (self.refused, self.idle, self.starting):
            for connection in waiting:
                del waiting[connection]
                connection.cut()
                return True
        return False


class AddressGroups:
    """Maps addresses to groups that share a limit. Loopback and the configured networks are trusted: they have no limit."""

    def __init__(self, trusted: Sequence[str]) -> None:
        self._trusted = tuple(network_of(text) for text in trusted)
        self.is_trusted = lru_cache(1024)(self._is_trusted)
        self.group = lru_cache(1024)(_group)

    def _is_trusted(self, peer: str) -> bool:
        try:
            address = ip_address(peer.partition("%")[0])
        except ValueError:
            return True  # a Unix socket
        mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        address = mapped or address
        return address.is_loopback or any(address in network for network in self._trusted)


def network_of(text: str) -> Network:
    """Parse an address or a network such as 10.0.0.0/8. Raises ValueError."""
    return ip_network(text, strict=False)


def _group(peer: str) -> str:
    try:
        address = ip_address(peer.partition("%")[0])
    except ValueError:
        return peer
    if isinstance(address, IPv6Address):
        mapped = address.ipv4_mapped
        return str(mapped) if mapped is not None else str(ip_network((address, _SITE_BITS), strict=False))
    return peer

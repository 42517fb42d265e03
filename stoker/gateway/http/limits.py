"""Limits on the memory and time that one HTTP connection may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits on client connections."""

    max_head_bytes: int = 32 << 10
    max_headers: int = 128
    max_body_bytes: int = 64 << 20
    max_held_bytes: int = 1 << 30  # of all request bodies in memory, and of all unread answers
    head_s: float = 10.0  # from the first to the last byte of a request head
    body_idle_s: float = 20.0  # longest pause between two parts of a request body
    body_s: float = 300.0  # from the end of the head to the end of the body
    keepalive_s: float = 75.0  # an idle connection is closed after this time
    write_stall_s: float = 60.0  # a client that reads nothing for this time is disconnected
    half_closed_probe_s: float = 0.5  # then a client that closed its sending side is probed: does it still read?
    max_connections: int = 10_000
    max_connections_per_address: int = 2_500
    trusted_addresses: tuple[str, ...] = ()  # addresses and networks without a limit of their own; loopback has none

    @property
    def sweep_s(self) -> float:
        """Return the interval at which connections are checked.

        A limit takes effect up to about this much late and never early. Time in which the whole process was stopped does
        not count.
        """
        shortest = min(self.head_s, self.body_idle_s, self.body_s, self.keepalive_s, self.write_stall_s)
        return min(1.0, max(0.01, shortest / 4))


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits on connections to workers."""

    max_head_bytes: int = 64 << 10
    max_headers: int = 256
    max_idle: int = 512  # connections kept for reuse
    idle_s: float = 30.0  # an unused connection is closed after this time
    read_ahead_bytes: int = 256 << 10  # buffered per response while it has no reader
    sweep_s: float = 0.25  # how often idle connections and head deadlines are checked

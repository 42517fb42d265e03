"""How much of anything a peer may make us hold, and for how long."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerLimits:
    max_head_bytes: int = 32 << 10
    max_headers: int = 128
    max_body_bytes: int = 64 << 20
    head_s: float = 10.0  # from a head's first byte to its last
    body_idle_s: float = 20.0  # without a byte of the body
    body_s: float = 300.0  # from the head's end to the body's
    keepalive_s: float = 75.0  # without a request
    write_stall_s: float = 60.0  # without the client taking a byte of what waits for it
    max_connections: int = 10_000

    @property
    def sweep_s(self) -> float:
        """How often connections are looked over. A limit strikes about this much too late, and never too early; a time in which
        the whole process stood still is not counted."""
        shortest = min(self.head_s, self.body_idle_s, self.body_s, self.keepalive_s, self.write_stall_s)
        return min(1.0, max(0.01, shortest / 4))


@dataclass(frozen=True, slots=True)
class ClientLimits:
    max_head_bytes: int = 64 << 10
    max_headers: int = 256
    max_idle: int = 512  # connections kept for reuse
    idle_s: float = 30.0  # after which an unused connection is dropped
    read_ahead_bytes: int = 256 << 10  # of a body that nobody reads yet
    sweep_s: float = 0.25  # how often idle connections and head deadlines are looked at

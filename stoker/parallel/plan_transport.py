"""The contract of what carries plans from rank 0 to the other ranks.

Ranks of the same machine read a ring in shared memory (ring.py), and each rank of another machine has a TCP connection
(plan_stream.py). The queue of a transport is bounded, and every wait has a deadline.
"""

from __future__ import annotations

from typing import Protocol

from stoker.base.errors import StokerError


class PlansStuck(StokerError):
    """A rank does not read its plans. The message names it."""

    code = "plans_stuck"


class PlanWriter(Protocol):
    """Rank 0's side."""

    def send(self, frame: bytes) -> None:
        """Send a frame to all readers, in order. Waits for readers that are behind, and raises PlansStuck if one stays behind."""


class PlanReader(Protocol):
    """The side of another rank."""

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next frame, None if there is none in time."""

"""Whether the worker accepts requests, and how many are running, so that a drain can wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from stoker.base.errors import Overloaded

DrainReason = Literal["stop", "model", "operator"]


class ServerState:
    """Counts running requests and holds the draining flag."""

    def __init__(self, drain_retry_after_s: float) -> None:
        self._drain_retry_after_s = drain_retry_after_s
        self._idle = asyncio.Event()
        self._idle.set()
        self._drains: dict[DrainReason, bool] = {}  # why it drains, and whether gateways shall move its requests
        self.num_running = 0

    @property
    def draining(self) -> bool:
        return bool(self._drains)

    @property
    def moving(self) -> bool:
        """Return True if gateways shall continue the running requests on other workers."""
        return any(self._drains.values())

    def begin_drain(self, reason: DrainReason = "stop", *, moves: bool = False) -> None:
        """Refuse new requests with 503. Running requests continue here, unless their gateways move them."""
        self._drains[reason] = moves

    def end_drain(self, reason: DrainReason) -> None:
        """Accept requests again, if there is no other reason to drain."""
        self._drains.pop(reason, None)

    async def wait_idle(self) -> None:
        """Wait until no request runs. The caller sets the timeout."""
        await self._idle.wait()

    def check_accepting(self) -> None:
        """Raise Overloaded while the worker is draining."""
        if self.draining:
            raise Overloaded(
                "This worker is draining and takes no new requests; retry on another worker or later.",
                retry_after_s=self._drain_retry_after_s,
                code="draining",
            )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count one generating request as running. Raises Overloaded while draining."""
        self.check_accepting()
        self.num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_running -= 1
            if self.num_running == 0:
                self._idle.set()

"""Whether the gateway accepts requests, and how many are running, so that a drain can wait for them."""

from __future__ import annotations

import asyncio

from stoker.base.errors import Overloaded


class GatewayState:
    """Counts running requests, and knows whether the gateway is leaving: first announced, then draining."""

    def __init__(self, drain_retry_after_s: float = 5.0) -> None:
        self._drain_retry_after_s = drain_retry_after_s
        self._idle: asyncio.Future[None] | None = None
        self.num_running = 0
        self.leaving = False
        self.draining = False

    def announce_drain(self) -> None:
        """Tell load balancers at `/ready` that the gateway leaves. New requests are still accepted."""
        self.leaving = True

    def begin_drain(self) -> None:
        """Refuse new requests with 503 from now on. Running and queued requests continue to their end."""
        self.leaving = self.draining = True

    def refusal(self) -> Overloaded | None:
        if not self.draining:
            return None
        return Overloaded(
            "The gateway is draining and accepts no new requests; retry on another gateway or later.",
            retry_after_s=self._drain_retry_after_s,
            code="draining",
        )

    def began(self) -> None:
        self.num_running += 1

    def ended(self) -> None:
        self.num_running -= 1
        if self.num_running == 0 and self._idle is not None:
            if not self._idle.done():
                self._idle.set_result(None)
            self._idle = None

    async def wait_idle(self) -> None:
        """Wait until no request is running. The caller sets the deadline."""
        while self.num_running:
            if self._idle is None:
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

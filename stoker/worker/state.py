"""Whether this server takes requests, and how many it works on: what a drain waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from stoker.base.errors import Overloaded


class ServerState:
    def __init__(self, drain_retry_after_s: float) -> None:
        self._drain_retry_after_s = drain_retry_after_s
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_running = 0
        self.draining = False

    def begin_drain(self) -> None:
        """From now on new requests are refused with 503; those that run go on to their end."""
        self.draining = True

    async def wait_idle(self) -> None:
        """Until no request runs. The caller has a deadline of its own."""
        await self._idle.wait()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the whole of one generating request; Overloaded while draining."""
        if self.draining:
            raise Overloaded(
                "This worker is draining and takes no new requests.",
                retry_after_s=self._drain_retry_after_s,
                code="draining",
            )
        self.num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_running -= 1
            if self.num_running == 0:
                self._idle.set()

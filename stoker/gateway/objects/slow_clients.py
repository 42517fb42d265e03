"""Waits for clients that read a stream slowly."""

from __future__ import annotations

import asyncio
import time

from stoker.gateway.http import HttpRequest

_PAUSE_S = 0.05
_STALL_S = 300.0  # how long a client of a stream may read nothing


async def wait_for_room(client: HttpRequest) -> None:
    """Wait until the client can take more. One that reads nothing for long is disconnected."""
    deadline_s = time.monotonic() + _STALL_S
    while client.paused and not client.gone:
        if time.monotonic() > deadline_s:
            client.abort()
            return
        await asyncio.sleep(_PAUSE_S)

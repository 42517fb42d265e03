"""Tells gateways that this worker is here, again and again, and that it leaves. Serving never depends on their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import aiohttp
import msgspec

from stoker.base import log as logs
from stoker.proto.messages import Registration
from stoker.worker.identity import SECRET_HEADER

PATH = "/stoker/register"

_HEARTBEAT_S = 3.0
_ANSWER_S = 3.0
_LEAVE_S = 1.0

log = logs.EventLog("register")


class Registrar:
    """A task for each gateway. `registration` is asked anew each time: an engine may come back with other figures."""

    def __init__(
        self,
        gateways: Sequence[str],
        registration: Callable[[], Registration],
        secret: str | None = None,
        heartbeat_s: float = _HEARTBEAT_S,
    ) -> None:
        self._urls = [gateway.rstrip("/") + PATH for gateway in gateways]
        self._registration = registration
        self._headers = {"Content-Type": "application/json"} | ({SECRET_HEADER: secret} if secret else {})
        self._heartbeat_s = heartbeat_s
        self._session: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        if not self._urls:
            return
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_S))
        self._tasks = [asyncio.create_task(self._keep(url), name="registration") for url in self._urls]

    async def leave(self) -> None:
        """Before a drain, and at the end. Once is enough."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        session, self._session = self._session, None
        if session is None:
            return
        async with session:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await asyncio.gather(*(self._send(session, "DELETE", url) for url in self._urls))

    async def _keep(self, url: str) -> None:
        assert self._session is not None
        reached: bool | None = None
        while True:
            reason = await self._send(self._session, "POST", url)
            if (reason is None) != reached:
                reached = reason is None
                if reached:
                    log.event("registered", gateway=url)
                else:
                    log.warning("gateway_not_reached", gateway=url, reason=reason)
            # Just as soon where it was not heard: a gateway that was started again has no other way to learn of us.
            await asyncio.sleep(self._heartbeat_s)

    async def _send(self, session: aiohttp.ClientSession, method: str, url: str) -> str | None:
        """Why the gateway did not take it; None if it did."""
        body = msgspec.json.encode(self._registration())
        try:
            async with session.request(method, url, data=body, headers=self._headers) as answer:
                if answer.status < 300:
                    return None
                return f"status {answer.status}: {(await answer.text())[:200]}"
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

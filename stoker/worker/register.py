"""Registers this worker with its gateways by heartbeats, and signs off when it leaves. A worker needs no gateway to serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import aiohttp
import msgspec

from stoker.base import log as logs
from stoker.proto.internal_http import REGISTER_PATH, SECRET_HEADER
from stoker.proto.messages import WorkerRegistration

_HEARTBEAT_S = 3.0
_ANSWER_S = 3.0
_LEAVE_S = 1.0

log = logs.EventLog("register")


class Registrar:
    """Sends heartbeats to each gateway. `registration` is called for every one: a restarted engine may have other values."""

    def __init__(
        self,
        gateways: Sequence[str],
        registration: Callable[[], WorkerRegistration],
        secret: str | None = None,
        heartbeat_s: float = _HEARTBEAT_S,
    ) -> None:
        self._urls = [gateway.rstrip("/") + REGISTER_PATH for gateway in gateways]
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
        """Stop the heartbeats and sign off. Called before a drain and at the end; the second call does nothing."""
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
            # The same interval after a failure: a restarted gateway learns of this worker only by its heartbeat.
            await asyncio.sleep(self._heartbeat_s)

    async def _send(self, session: aiohttp.ClientSession, method: str, url: str) -> str | None:
        """Return why the gateway did not accept the message, or None if it did."""
        body = msgspec.json.encode(self._registration())
        try:
            async with session.request(method, url, data=body, headers=self._headers) as answer:
                if answer.status < 300:
                    return None
                return f"status {answer.status}: {(await answer.text())[:200]}"
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

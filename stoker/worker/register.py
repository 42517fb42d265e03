"""Registers this worker with its gateways by heartbeats, and signs off when it leaves. A worker needs no gateway to serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import aiohttp
import msgspec

from stoker.base import log as logs
from stoker.base.errors import ConfigError
from stoker.base.fleet_key import FleetKey
from stoker.proto.internal_http import REGISTER_PATH
from stoker.proto.messages import WorkerRegistration
from stoker.proto.signed_http import AUTH_HEADER, CHALLENGE_HEADER, PROOF_HEADER, RequestSigner
from stoker.worker.gateway_file import listed_gateways

_HEARTBEAT_S = 3.0
_ANSWER_S = 3.0
_LEAVE_S = 1.0

log = logs.EventLog("register")


class Registrar:
    """Sends heartbeats to each gateway. `registration` is called for every one: a restarted engine may have other values.

    The gateways in `gateway_file` are added. The file is read again before each heartbeat, because a gateway may move.
    """

    def __init__(
        self,
        gateways: Sequence[str],
        registration: Callable[[], WorkerRegistration],
        secret: str | None = None,
        heartbeat_s: float = _HEARTBEAT_S,
        gateway_file: Path | None = None,
    ) -> None:
        self._key = None if secret is None else FleetKey(secret)
        self._fixed = list(gateways)
        self._file = gateway_file
        self._signers: dict[str, RequestSigner | None] = {}  # by the URL that heartbeats are sent to
        self._registration = registration
        self._heartbeat_s = heartbeat_s
        self._session: aiohttp.ClientSession | None = None
        self._heartbeats: dict[str, asyncio.Task[None]] = {}
        self._following: asyncio.Task[None] | None = None

    def start(self) -> None:
        if not self._fixed and self._file is None:
            return
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_S))
        for gateway in self._fixed:
            self._join(gateway)
        if self._file is not None:
            self._following = asyncio.create_task(self._follow(self._file), name="gateway-file")

    async def leave(self) -> None:
        """Stop the heartbeats and sign off. Called before a drain and at the end; the second call does nothing."""
        tasks, self._heartbeats = list(self._heartbeats.values()), {}
        if self._following is not None:
            tasks.append(self._following)
            self._following = None
        await _cancelled(tasks)
        session, self._session = self._session, None
        if session is None:
            return
        async with session:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await asyncio.gather(*(self._send(session, "DELETE", url) for url in self._signers))

    def _join(self, gateway: str) -> None:
        url = gateway.rstrip("/") + REGISTER_PATH
        if url not in self._heartbeats:
            self._signers[url] = None if self._key is None else RequestSigner(self._key)
            self._heartbeats[url] = asyncio.create_task(self._keep(url), name="registration")

    async def _follow(self, file: Path) -> None:
        """Register with the gateways that the file names, and sign off from those that it no longer names."""
        problem = ""
        while True:
            try:
                wanted = {gateway.rstrip("/"): None for gateway in [*self._fixed, *listed_gateways(file)]}
            except ConfigError as error:  # the gateways that are known stay
                if error.message != problem:
                    problem = error.message
                    log.warning("gateway_file_not_read", reason=problem)
            else:
                problem = ""
                for gateway in wanted:
                    self._join(gateway)
                for url in self._heartbeats.keys() - {gateway + REGISTER_PATH for gateway in wanted}:
                    await self._part_from(url)
            await asyncio.sleep(self._heartbeat_s)

    async def _part_from(self, url: str) -> None:
        assert self._session is not None
        await _cancelled([self._heartbeats.pop(url)])
        await self._send(self._session, "DELETE", url)
        del self._signers[url]

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
        body, signer = msgspec.json.encode(self._registration()), self._signers[url]
        try:
            for _ in range(2):  # signed with an outdated challenge, a message is refused once
                async with session.request(method, url, data=body, headers=_headers(signer, method, body)) as answer:
                    if answer.status < 300:
                        is_proven = signer is None or signer.is_proven(_header(answer, PROOF_HEADER))
                        return None if is_proven else "the answer does not prove that the gateway has the same secret"
                    reason = f"status {answer.status}: {(await answer.text())[:200]}"
                    if answer.status != 401 or signer is None or not signer.learn(_header(answer, CHALLENGE_HEADER)):
                        break
            return reason
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _headers(signer: RequestSigner | None, method: str, body: bytes) -> dict[str, str]:
    """Return the headers of a message, signed if there is a secret."""
    headers = {"Content-Type": "application/json"}
    if signer is not None:
        headers[AUTH_HEADER] = signer.sign(method.encode(), REGISTER_PATH.encode(), body).decode()
    return headers


def _header(answer: aiohttp.ClientResponse, name: str) -> bytes:
    return answer.headers.get(name, "").encode("utf-8", "surrogateescape")

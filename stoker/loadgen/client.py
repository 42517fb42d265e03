"""A client that sends one request, reads its stream and records what happened.

It often shares the machine with the server it measures, so it parses bytes as they arrive and builds no object that is
not used.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from stoker.base.address import host_of_url
from stoker.base.clock import Clock, RealClock
from stoker.base.errors import ConfigError, StokerError
from stoker.loadgen.session import Turn
from stoker.loadgen.stream import AnswerReader, Delta, Record, error_body

SESSION_HEADER = "x-session-affinity"
PARENT_HEADER = "x-parent-session-id"


class ServerUnreachable(StokerError):
    code = "server_unreachable"


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and how requests are sent to it."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0
    new_connections: bool = False  # open a connection for each request
    session_header: bool = False  # send the session id as x-session-affinity

    def __post_init__(self) -> None:
        host_of_url("--url", self.url)
        if not 0 < self.timeout_s < float("inf"):  # aiohttp takes 0 as "no timeout"
            raise ConfigError(f"--timeout-s {self.timeout_s:g}: must be above 0 and finite")


class _ListedModel(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_ListedModel]


class Client:
    def __init__(self, target: Target, clock: Clock | None = None) -> None:
        self._target = target
        self._clock = clock or RealClock()
        self._url = target.url.rstrip("/").removesuffix("/v1")
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=self._target.new_connections),
            timeout=aiohttp.ClientTimeout(total=self._target.timeout_s),
            headers={**self._target.headers, "content-type": "application/json"},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._http is not None
        await self._http.close()

    async def first_model(self) -> str:
        """Return the first model that the server lists."""
        assert self._http is not None
        url = f"{self._url}/v1/models"
        try:
            async with self._http.get(url) as response:
                body = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as lost:
            message = f"no server answers at {self._url} ({_reason(lost)}): check --url, or start one with `stoker up`"
            raise ServerUnreachable(message) from lost
        if response.status != 200:
            raise ServerUnreachable(f"{url} answered {response.status}: {error_body(body).message}")
        try:
            models = msgspec.json.decode(body, type=_Models).data
        except msgspec.DecodeError as wrong:
            raise ServerUnreachable(f"{url} does not answer like an OpenAI-compatible server: {wrong}") from wrong
        if not models:
            raise ServerUnreachable(f"{url} lists no model")
        return models[0].id

    async def send(
        self,
        turn: Turn,
        options: Mapping[str, Any],
        answers: Sequence[str] = (),
        on_delta: Callable[[Delta], None] | None = None,
    ) -> Record:
        """Send one turn and return its record. Errors of the server and the network are recorded, not raised.

        `options` are the fields of the body that are the same in all requests.
        """
        assert self._http is not None
        body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, **options}
        body.update(turn.prompt.fields(answers))
        if turn.max_tokens is not None:
            body["max_tokens"] = turn.max_tokens
        data = msgspec.json.encode(body)
        record = Record(started_s=self._clock.now())
        reader = AnswerReader(record)
        try:
            async with self._http.post(
                self._url + turn.prompt.path, data=data, headers=self._session_headers(turn)
            ) as response:
                if response.status != 200:
                    error = error_body(await response.read())
                    record.fail(f"{response.status} {error.kind()}", error.message)
                else:
                    async for received in response.content.iter_any():
                        for delta in reader.feed(received, self._clock.now()):
                            if on_delta is not None:
                                on_delta(delta)
        except TimeoutError:  # before ClientError: aiohttp's timeouts are both
            record.fail("timeout", f"no complete answer within {self._target.timeout_s:g} s")
        except aiohttp.ClientConnectorError as lost:
            record.fail("connect", f"no server answers at {self._url} ({_reason(lost)})")
        except (aiohttp.ClientError, OSError) as lost:
            record.fail("disconnected", str(lost) or type(lost).__name__)
        except asyncio.CancelledError:
            record.fail("cancelled")
            raise
        finally:
            reader.end(self._clock.now())
        return record

    def _session_headers(self, turn: Turn) -> dict[str, str]:
        if not self._target.session_header:
            return {}
        headers = {SESSION_HEADER: turn.session}
        if turn.parent:
            headers[PARENT_HEADER] = turn.parent
        return headers


def _reason(lost: Exception) -> str:
    """Return why a connection failed, in the words of the operating system where it has any."""
    number = lost.errno if isinstance(lost, OSError) else None
    if number is not None and number > 0:  # negative numbers are the resolver's own
        return os.strerror(number)
    return str(lost) or type(lost).__name__

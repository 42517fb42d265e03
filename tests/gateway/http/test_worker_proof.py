"""A new connection gets no request before the worker has proven that it has the fleet's secret."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest
from waiting import LONG_S, until
from wire import serving

from stoker.base.fleet_key import FleetKey
from stoker.gateway.http import ClientLimits, ConnectionPool, HttpRequest, Origin, Unreachable
from stoker.proto.signed_http import RequestSigner, RequestVerifier

KEY, OTHER_KEY = FleetKey("s" * 16), FleetKey("x" * 16)
PROMPT = b'{"messages": "confidential"}'

Handler = Callable[[HttpRequest], Awaitable[None]]


class SignedWorker:
    """Answers signed requests with a proof, and others with its challenge."""

    def __init__(self, key: FleetKey = KEY) -> None:
        self._verifier = RequestVerifier(key)
        self.seen: list[tuple[bytes, bytes]] = []  # method and body of each request

    async def __call__(self, request: HttpRequest) -> None:
        self.seen.append((request.method, request.body))
        signed = self._verifier.check(request.header(b"x-stoker-auth"), request.method, request.path)
        if signed is None or not signed.has_body(request.body):
            request.respond(401, [(b"x-stoker-challenge", self._verifier.challenge.encode())], b"")
            return
        request.respond(200, [(b"x-stoker-proof", signed.proof)], b"ok")


async def send(pool: ConnectionPool) -> int:
    answer = await pool.send(b"POST", b"/v1/chat/completions", (), PROMPT, connect_s=LONG_S, head_s=LONG_S)
    await answer.read(1 << 16)
    return answer.status


def pool_to(port: int) -> ConnectionPool:
    return ConnectionPool(Origin("http", "127.0.0.1", port), ClientLimits(), RequestSigner(KEY), b"/ready")


def test_the_first_request_of_a_connection_follows_a_proof() -> None:
    async def main() -> None:
        worker = SignedWorker()
        async with serving(worker) as (server, _):
            pool = pool_to(server.port)
            assert [await send(pool) for _ in range(3)] == [200] * 3
            assert worker.seen == [(b"GET", b"")] * 2 + [(b"POST", PROMPT)] * 3  # the first one learns the challenge
            worker.seen.clear()
            assert await asyncio.gather(*(send(pool) for _ in range(8))) == [200] * 8
            assert worker.seen.count((b"GET", b"")) == 7  # one for each new connection
            pool.close()

    asyncio.run(main())


async def _always_200(request: HttpRequest) -> None:
    request.respond(200, [(b"x-stoker-proof", b"0" * 32)], b"")


async def _always_401(request: HttpRequest) -> None:
    request.respond(401, [(b"x-stoker-challenge", b"0" * 32)], b"")


async def _large(request: HttpRequest) -> None:
    request.respond(200, [], b"x" * (1 << 20))


@pytest.mark.parametrize("impostor", [_always_200, _always_401, _large, SignedWorker(OTHER_KEY)], ids=lambda _: "")
def test_an_impostor_never_gets_a_prompt(impostor: Handler) -> None:
    async def main() -> None:
        bodies = []

        async def handler(request: HttpRequest) -> None:
            bodies.append(request.body)
            await impostor(request)

        async with serving(handler) as (server, _):
            pool = pool_to(server.port)
            for _ in range(3):
                with pytest.raises(Unreachable, match="secret"):
                    await send(pool)
            assert bodies
            assert set(bodies) == {b""}
            assert pool.num_idle == 0
            pool.close()

    asyncio.run(main())


def test_an_impostor_that_takes_the_port_of_a_worker_gets_no_prompt() -> None:
    async def main() -> None:
        async with serving(SignedWorker()) as (server, _):
            port = server.port
            pool = pool_to(port)
            assert await send(pool) == 200
        thief = SignedWorker(OTHER_KEY)

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer):  # also when the test ends first
                thief.seen.append((await reader.readuntil(b"\r\n\r\n"), b""))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                await writer.drain()
                thief.seen.append((b"after", await reader.read()))

        async with await asyncio.start_server(take, "127.0.0.1", port):
            with pytest.raises(Unreachable, match="secret"):
                await send(pool)
        assert all(b"confidential" not in part for seen in thief.seen for part in seen)
        pool.close()

    asyncio.run(main())


def test_a_cancelled_proof_leaves_no_connection() -> None:
    async def main() -> None:
        async def hang(request: HttpRequest) -> None:
            await asyncio.sleep(LONG_S)

        async with serving(hang) as (server, _):
            pool = pool_to(server.port)
            sending = asyncio.create_task(send(pool))
            await until(lambda: pool.num_open == 1)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            await until(lambda: pool.num_open == 0)
            assert pool.num_idle == 0
            pool.close()

    asyncio.run(main())

"""Request heads and bodies through the server's side of a connection. Any split of the bytes gives the same requests."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from stoker.gateway.http import HttpRequest, Server, ServerLimits
from stoker.gateway.http.client_connection import ClientConnection
from stoker.gateway.http.head import header_block
from tests.fuzz.event_loop import run
from tests.fuzz.target import FuzzTarget, pieces
from tests.recording_transport import RecordingTransport

_LIMITS = ServerLimits(max_head_bytes=4000, max_body_bytes=20_000)


async def _serve(parts: list[bytes]) -> tuple[list[Any], bytes]:
    seen: list[Any] = []

    async def handler(request: HttpRequest) -> None:
        header_block(request.headers)  # raises if a value could start another header
        seen.append((request.method, request.path, request.query, tuple(request.headers), request.body))
        request.respond(200, [], b"%d" % len(seen))

    server = Server(handler, _LIMITS, on_bad=lambda peer, reason: None)
    server.loop = asyncio.get_running_loop()
    wire = RecordingTransport()
    connection = ClientConnection(server)
    connection.connection_made(wire)
    for part in parts:
        connection.data_received(part)
        while server.num_running:  # noqa: ASYNC110 - the handler needs a few turns of the loop
            await asyncio.sleep(0)
    connection.connection_lost(None)
    # Which error a refused request gets may depend on how much of it had arrived. That it is refused may not.
    answers = wire.written.count(b"HTTP/1.1 200 ")
    return seen, b"refused" if wire.written.count(b"HTTP/1.1 4") + wire.written.count(
        b"HTTP/1.1 5"
    ) else b"%d" % answers


def execute(data: bytes, rng: random.Random) -> None:
    if not data:
        return
    whole = run(_serve([data]))
    split = run(_serve(pieces(data, rng)))
    assert split == whole, (split, whole)


def seeds() -> list[bytes]:
    head = b"POST /v1/chat/completions?a=%20b HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer k\r\n"
    return [
        b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n",
        head + b"content-length: 5\r\n\r\nhello" + b"GET / HTTP/1.0\r\n\r\n",
        head
        + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n3;x=y\r\nabc\r\n0\r\nt: v\r\n\r\nGET / HTTP/1.1\r\nhost: b\r\n\r\n",
        head + b"expect: 100-continue\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}",
    ]


TARGET = FuzzTarget(
    execute,
    seeds,
    max_input_bytes=8 << 10,
    tokens=[
        b"\r\n", b"\r\n\r\n", b"\n", b"\r", b" ", b"\t", b":", b"content-length: 1\r\n", b"transfer-encoding: chunked\r\n",
        b"HTTP/1.1", b"HTTP/1.0", b"0\r\n\r\n", b"1\r\na\r\n", b"connection: keep-alive\r\n", b"%2e%2e/", b"//", b"\x00",
        b"host: a\r\n", b"ffffffffffffffff\r\n", b";a=b",
    ],
    base_bytes=8 << 20,
)  # fmt: skip

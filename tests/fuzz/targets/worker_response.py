"""Response heads and bodies of workers, through the gateway's side of a connection. Any split gives the same result."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from stoker.base.errors import StokerError
from stoker.gateway.http.head import HeadParser
from stoker.gateway.http.limits import ClientLimits
from stoker.gateway.http.worker_response import WorkerConnection, WorkerResponse
from tests.fuzz.event_loop import run
from tests.fuzz.target import FuzzTarget, pieces
from tests.recording_transport import RecordingTransport


class _Pool:
    """The owner of a connection: counts what is given back."""

    def __init__(self) -> None:
        self.heads = HeadParser(256)
        self.limits = ClientLimits(max_head_bytes=4000)
        self.where = "worker"
        self.num_released = 0

    def release(self, connection: WorkerConnection) -> None:
        self.num_released += 1

    def forget(self, connection: WorkerConnection) -> None:
        pass


async def _receive(parts: list[bytes]) -> Any:
    pool = _Pool()
    connection = WorkerConnection(pool, asyncio.get_running_loop())
    connection.connection_made(RecordingTransport())
    waiting = connection.send(b"GET / HTTP/1.1\r\n\r\n", b"", to_head=False, deadline=None)
    for part in parts:
        if pool.num_released:
            break  # the pool closes a connection on which bytes arrive between two requests
        connection.data_received(part)
    if not pool.num_released:
        connection.connection_lost(None)
    try:
        response = await waiting
        assert isinstance(response, WorkerResponse)
        body = await response.read(1 << 20)
    except StokerError:
        return "lost"
    return response.status, tuple(response.headers), body


def execute(data: bytes, rng: random.Random) -> None:
    whole = run(_receive([data]))
    split = run(_receive(pieces(data, rng)))
    assert split == whole, (split, whole)


def seeds() -> list[bytes]:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    return [
        head + b"content-length: 5\r\n\r\nhello",
        head + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + head + b"\r\nuntil close",
        b"HTTP/1.0 503 No\r\nconnection: keep-alive\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 204 None\r\n\r\n",
    ]


TARGET = FuzzTarget(
    execute,
    seeds,
    max_input_bytes=8 << 10,
    tokens=[
        b"\r\n", b"\r\n\r\n", b"\n", b" ", b":", b"HTTP/1.1 ", b"101", b"299", b"content-length: 3\r\n", b"0\r\n\r\n",
        b"transfer-encoding: chunked\r\n", b"HTTP/1.1 102 P\r\n\r\n", b"connection: close\r\n", b"1\r\na\r\n",
    ],
)  # fmt: skip

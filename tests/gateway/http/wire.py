"""Raw sockets for tests: peers that send any bytes in any pieces and see exactly what is sent back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, cast

from waiting import LONG_S, until

from stoker.gateway.http import ClientLimits, ConnectionPool, HttpRequest, Origin, Server, ServerLimits, WorkerResponse

Run = Callable[[Coroutine[Any, Any, None]], None]  # the fixture `run`: runs a test on each event loop

GET = b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n"


class Bad(list[str]):
    """Collects the calls of `on_bad`."""

    def __call__(self, peer: str, reason: str) -> None:
        assert peer == "127.0.0.1"
        self.append(reason)


async def echo(request: HttpRequest) -> None:
    """Answers with what was parsed from the request."""
    seen = b"%b|%b|%b|%b" % (request.method, request.path, request.query, request.body)
    request.respond(200, [(b"x-count", b"%d" % len(request.headers))], seen)


@contextlib.asynccontextmanager
async def serving(
    handler: Callable[[HttpRequest], Awaitable[None]] = echo, limits: ServerLimits | None = None
) -> AsyncIterator[tuple[Server, Bad]]:
    bad = Bad()
    server = Server(handler, limits or ServerLimits(), on_bad=bad)
    await server.listen("127.0.0.1", 0)
    try:
        yield server, bad
    finally:
        await server.close(0)


class Peer:
    """A client of the server under test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def stop_reading(self) -> None:
        cast(asyncio.Transport, self.writer.transport).pause_reading()

    async def answer(self, *, to_head: bool = False) -> tuple[int, dict[bytes, bytes], bytes]:
        """Read one whole response, independently of the code under test."""
        async with asyncio.timeout(LONG_S):
            lines = (await self.reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
            status = int(lines[0].split(b" ")[1])
            headers = dict(line.split(b": ", 1) for line in lines[1:])
            if to_head or status in (100, 204, 304):
                return status, headers, b""
            if headers.get(b"transfer-encoding") == b"chunked":
                pieces = []
                while size := int((await self.reader.readline())[:-2], 16):
                    pieces.append(await self.reader.readexactly(size))
                    assert await self.reader.readexactly(2) == b"\r\n"
                assert await self.reader.readexactly(2) == b"\r\n"
                return status, headers, b"".join(pieces)
            if b"content-length" in headers:
                return status, headers, await self.reader.readexactly(int(headers[b"content-length"]))
            return status, headers, await self.reader.read()

    async def closed(self) -> bool:
        """Check that the server closes without sending anything more."""
        async with asyncio.timeout(LONG_S):
            try:
                return await self.reader.read() == b""
            except ConnectionError:
                return True

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


@contextlib.asynccontextmanager
async def peer(port: int, limit: int = 1 << 16) -> AsyncIterator[Peer]:
    one = Peer(*await asyncio.open_connection("127.0.0.1", port, limit=limit))
    try:
        yield one
    finally:
        await one.close()


async def ask(port: int, data: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    async with peer(port) as one:
        one.send(data)
        return await one.answer()


Play = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class FakeWorker:
    """A server that runs a script for each connection."""

    def __init__(self, play: Play) -> None:
        self.num_connections = 0
        self.requests: list[bytes] = []
        self._play = play
        self._tasks: set[asyncio.Task[None]] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._play(reader, writer)
        finally:
            writer.close()
            self._tasks.discard(task)

    async def request(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        self.requests.append(head)
        for line in head.split(b"\r\n"):
            if line.startswith(b"content-length: "):
                await reader.readexactly(int(line[16:]))
        return head

    @contextlib.asynccontextmanager
    async def up(self, limits: ClientLimits | None = None) -> AsyncIterator[ConnectionPool]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        pool = ConnectionPool(Origin.from_url(f"http://127.0.0.1:{port}"), limits or ClientLimits())
        try:
            yield pool
        finally:
            pool.close()
            server.close()
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert pool.num_idle == 0
            await until(lambda: pool.num_open == 0)


def worker_saying(*answers: bytes, then_close: bool = False) -> FakeWorker:
    """Answers request i of each connection with answers[i]."""

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for each in answers:
            await worker.request(reader)
            writer.write(each)
            await writer.drain()
        if not then_close:
            await reader.read()

    worker = FakeWorker(play)
    return worker


async def get(
    pool: ConnectionPool, method: bytes = b"GET", head_s: float | None = LONG_S, body: bytes = b""
) -> WorkerResponse:
    """Send a request to the worker under test."""
    return await pool.send(method, b"/p", [(b"x-h", b"1")], body, connect_s=LONG_S, head_s=head_s)


async def text(pool: ConnectionPool, method: bytes = b"GET") -> bytes:
    """Send a request and return the whole response body."""
    return await (await get(pool, method)).read(1 << 20)

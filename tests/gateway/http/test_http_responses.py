"""Responses as the HTTP client reads them: framing, invalid bytes, limits, failing readers and back-pressure."""

from __future__ import annotations

import asyncio

import pytest
from waiting import LONG_S, settled, until
from wire import FakeWorker, Run, get, serving, text, worker_saying

from stoker.gateway.http import (
    HttpRequest,
    ResponseLost,
    ResponseTooLarge,
    WorkerResponse,
    end_to_end,
)

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A:  b \r\n\r\nok"
SSE = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def test_interim_answers_are_skipped(run: Run) -> None:
    async def main() -> None:
        interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"
        async with worker_saying(interim + OK, OK).up() as pool:
            assert await text(pool) == b"ok"
            assert await text(pool) == b"ok"
        async with worker_saying(b"HTTP/1.1 102 Processing\r\n\r\n" * 100).up() as pool:
            with pytest.raises(ResponseLost):
                await get(pool)

    run(main())


def test_a_response_without_length_ends_with_the_connection(run: Run) -> None:
    async def main() -> None:
        worker = worker_saying(b"HTTP/1.1 200 OK\r\n\r\nsome text", then_close=True)
        async with worker.up() as pool:
            assert await text(pool) == b"some text"
            await until(lambda: pool.num_open == 0)

    run(main())


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (b"HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n"),
        (b"HEAD", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"),
        (b"GET", b"HTTP/1.1 204 No Content\r\n\r\n"),
        (b"GET", b"HTTP/1.1 304 Not Modified\r\ncontent-length: 99\r\n\r\n"),
        (b"GET", b"HTTP/1.1 200\r\ncontent-length: 0\r\n\r\n"),
    ],
)
def test_answers_without_a_body(run: Run, method: bytes, said: bytes) -> None:
    async def main() -> None:
        async with worker_saying(said, OK).up() as pool:
            answer = await get(pool, method)
            assert answer.ended
            assert await answer.read(0) == b""
            assert pool.num_idle == 1
            assert await text(pool) == b"ok"

    run(main())


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        OK + b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\npoison",
        SSE + b"2\r\nok\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n",
    ],
)
def test_connections_that_must_not_be_reused_are_not(run: Run, said: bytes) -> None:
    async def main() -> None:
        worker = worker_saying(said, OK)
        async with worker.up() as pool:
            assert await text(pool) == b"ok"
            assert pool.num_idle == 0
            assert await text(pool) == b"ok"
            assert worker.num_connections == 2

    run(main())


def test_an_answer_to_half_a_request_lets_go_of_the_other_half(run: Run) -> None:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 0\r\n\r\n")
        await asyncio.sleep(2 * LONG_S)  # the rest is never read

    async def main() -> None:
        async with FakeWorker(play).up() as pool:
            answer = await pool.send(b"POST", b"/", [], bytes(32 << 20), connect_s=LONG_S, head_s=LONG_S)
            assert (answer.status, await answer.read(100)) == (413, b"")
            await until(lambda: pool.num_open == 0)

    run(main())


def test_unexpected_bytes_close_an_idle_connection(run: Run) -> None:
    async def main() -> None:
        async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await worker.request(reader)
            writer.write(OK)
            await answered.wait()
            writer.write(OK)
            await reader.read()

        answered = asyncio.Event()
        worker = FakeWorker(play)
        async with worker.up() as pool:
            assert await text(pool) == b"ok"
            assert pool.num_idle == 1
            answered.set()
            await until(lambda: pool.num_open == 0)

    run(main())


@pytest.mark.parametrize(
    "said",
    [
        b"garbage",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x00" * 100,
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"HTTP/1.1 999 What\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\r\n folded\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 70_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 70_000,
        b"HTTP/1.1 200 OK\r\n" + b"x: a\r\n" * 300 + b"\r\n",
    ],
)
def test_garbage_instead_of_a_head_is_lost(run: Run, said: bytes) -> None:
    async def main() -> None:
        async with worker_saying(said).up() as pool:
            with pytest.raises(ResponseLost):
                await get(pool)
            await until(lambda: pool.num_open == 0)

    run(main())


@pytest.mark.parametrize(
    "said", [b"hello", b"5\r\nhelloo\r\n", b"-1\r\n\r\n", b"5\nhello\r\n", b"\x00\x00", b"a" * 1000]
)
def test_garbage_instead_of_a_chunk_is_lost(run: Run, said: bytes) -> None:
    async def main() -> None:
        async with worker_saying(SSE + b"2\r\nok\r\n" + said + b"\r\n\r\n").up() as pool:
            answer = await get(pool)
            pieces: list[bytes] = []
            with pytest.raises(ResponseLost):
                await answer.relay(pieces.append)
            await until(lambda: pool.num_open == 0)

    run(main())


def test_read_has_a_limit(run: Run) -> None:
    async def main() -> None:
        said = b"HTTP/1.1 200 OK\r\ncontent-length: 5000000\r\n\r\n" + b"x" * 5_000_000
        async with worker_saying(said).up() as pool:
            with pytest.raises(ResponseTooLarge, match="1000 bytes"):
                await (await get(pool)).read(1000)
            await until(lambda: pool.num_open == 0)

    run(main())


def test_a_failing_sink_ends_the_answer(run: Run) -> None:
    async def main() -> None:
        def sink(data: bytes) -> None:
            raise ZeroDivisionError

        async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await worker.request(reader)
            writer.write(SSE)
            await until(lambda: answer is not None and answer.sink is not None)
            writer.write(b"2\r\nok\r\n")
            await reader.read()

        answer: WorkerResponse | None = None
        worker = FakeWorker(play)
        async with worker.up() as pool:
            answer = await get(pool)
            with pytest.raises(ZeroDivisionError):
                await answer.relay(sink)
            await until(lambda: pool.num_open == 0)

    run(main())


def test_a_response_without_a_reader_is_not_read_ahead(run: Run) -> None:
    async def main() -> None:
        size = 50_000_000
        writers: list[asyncio.StreamWriter] = []

        async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await worker.request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size)
            writers.append(writer)
            await reader.read()

        worker = FakeWorker(play)
        async with worker.up() as pool:
            answer = await get(pool)
            await until(lambda: bool(writers))
            stuck = await settled(writers[0].transport.get_write_buffer_size)
            assert stuck > 30_000_000
            assert answer._kept_bytes < 1 << 20
            assert len(await answer.read(size)) == size
            assert pool.num_idle == 1

    run(main())


def test_back_pressure_goes_from_a_slow_client_to_the_worker(run: Run) -> None:
    """Client <- Server <- ConnectionPool <- worker: the client does not read, so the worker cannot write."""

    async def main() -> None:
        size = 50_000_000
        sent: list[int] = []

        async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await worker.request(reader)
            writer.write(SSE)
            for _ in range(size // 10_000):
                writer.write(b"%x\r\n%b\r\n" % (10_000, b"x" * 10_000))
                sent.append(10_000)
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            await reader.read()

        worker = FakeWorker(play)
        async with worker.up() as pool:

            async def splice(request: HttpRequest) -> None:
                answer = await get(pool)
                request.on_pause, request.on_resume, request.on_gone = answer.pause, answer.resume, answer.abort
                request.start(answer.status, end_to_end(answer.headers))
                await answer.relay(request.write)
                request.finish()

            async with serving(splice) as (server, _):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n")
                await until(lambda: bool(sent))
                # Only socket buffers and the gateway's two high-water marks are between them.
                assert await settled(lambda: sum(sent)) < 25_000_000
                got = 0
                while got < size:
                    got += len(await reader.read(1 << 20))
                await until(lambda: pool.num_idle == 1)
                writer.close()
                await writer.wait_closed()

    run(main())

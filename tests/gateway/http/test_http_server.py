"""The HTTP server with valid requests: what HTTP/1.1 clients do, and what a handler can rely on."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from waiting import LONG_S, settled, until
from wire import GET, Run, echo, peer, serving

from stoker.gateway.http import HttpRequest, header_block

POST = b"POST /v1/x?q=1&r=%20 HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello"


def test_one_connection_serves_many_requests(run: Run) -> None:
    async def main() -> None:
        async with serving() as (server, bad), peer(server.port) as client:
            for _ in range(3):
                client.send(POST)
                status, headers, body = await client.answer()
                assert (status, headers[b"x-count"], body) == (200, b"1", b"POST|/v1/x|q=1&r=%20|hello")
            assert server.num_connections == 1
            assert bad == []

    run(main())


def test_pipelined_requests_are_served_one_after_the_other(run: Run) -> None:
    at_once = 0

    async def slow(request: HttpRequest) -> None:
        nonlocal at_once
        at_once += 1
        assert at_once == 1
        await asyncio.sleep(0.01)
        at_once -= 1
        await echo(request)

    async def main() -> None:
        async with serving(slow) as (server, _), peer(server.port) as client:
            requests = [b"GET /%d HTTP/1.1\r\nhost: a\r\n\r\n" % number for number in range(10)]
            client.send(b"".join(requests) + POST)
            for number in range(10):
                assert (await client.answer())[2] == b"GET|/%d||" % number
            assert (await client.answer())[2].endswith(b"|hello")

    run(main())


def test_a_flood_of_pipelined_requests_is_not_read_ahead(run: Run) -> None:
    async def main() -> None:
        gate = asyncio.Event()

        async def gated(request: HttpRequest) -> None:
            await gate.wait()
            await echo(request)

        async with serving(gated) as (server, _), peer(server.port) as client:
            flood = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n" + b"x" * 100_000
            client.send(flood * 300)
            waiting = await settled(client.writer.transport.get_write_buffer_size)
            gate.set()
            # Unread bytes stay in the client and in the kernel.
            assert waiting > 10 << 20
            for _ in range(300):
                assert len((await client.answer())[2]) == 100_009

    run(main())


def test_chunked_bodies_with_extensions_and_trailers(run: Run) -> None:
    async def main() -> None:
        async with serving() as (server, _), peer(server.port) as client:
            client.send(b"POST /c HTTP/1.1\r\nhost: a\r\nTransfer-Encoding: Chunked\r\n\r\n")
            client.send(b'5;name="v"\r\nhello\r\n1;x y\r\n \r\n00A\r\n0123456789\r\n0\r\nX-Sum: 1\r\n\r\n' + GET)
            assert (await client.answer())[2] == b"POST|/c||hello 0123456789"
            assert (await client.answer())[2] == b"GET|/x||"

    run(main())


def test_expect_100_continue(run: Run) -> None:
    async def main() -> None:
        async with serving() as (server, bad), peer(server.port) as client:
            client.send(b"POST /e HTTP/1.1\r\nhost: a\r\nExpect: 100-Continue\r\ncontent-length: 2\r\n\r\n")
            assert (await client.answer())[0] == 100
            client.send(b"ok")
            assert (await client.answer())[2] == b"POST|/e||ok"
            # A client that does not wait gets no 100 Continue.
            client.send(b"POST /e HTTP/1.1\r\nhost: a\r\nExpect: 100-continue\r\ncontent-length: 2\r\n\r\nok")
            assert (await client.answer())[2] == b"POST|/e||ok"
            client.send(b"POST /e HTTP/1.1\r\nhost: a\r\nExpect: 200-maybe\r\ncontent-length: 2\r\n\r\nok")
            assert (await client.answer())[0] == 417
            assert len(bad) == 1

    run(main())


def test_http_1_0(run: Run) -> None:
    async def stream(request: HttpRequest) -> None:
        request.start(200, [])
        request.write(b"one ")
        request.write(b"two")
        request.finish()

    async def main() -> None:
        async with serving() as (server, _), peer(server.port) as client:
            client.send(b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            status, headers, _body = await client.answer()
            assert (status, headers[b"connection"]) == (200, b"keep-alive")
            client.send(b"GET /a HTTP/1.0\r\n\r\n")
            assert (await client.answer())[1][b"connection"] == b"close"
            assert await client.closed()
        async with serving(stream) as (server, _), peer(server.port) as client:
            client.send(b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            _, headers, body = await client.answer()
            assert b"transfer-encoding" not in headers
            assert (headers[b"connection"], body) == (b"close", b"one two")
            assert await client.closed()

    run(main())


def test_connection_close_is_honoured(run: Run) -> None:
    async def main() -> None:
        async with serving() as (server, _), peer(server.port) as client:
            client.send(b"GET /a HTTP/1.1\r\nhost: a\r\nConnection: foo, Close\r\n\r\n" + GET)
            _, headers, body = await client.answer()
            assert (headers[b"connection"], body) == (b"close", b"GET|/a||")
            assert await client.closed()

    run(main())


def test_head_and_bodiless_answers(run: Run) -> None:
    async def handler(request: HttpRequest) -> None:
        if request.path == b"/stream":
            request.start(200, [])
            request.write(b"unseen")
            request.finish()
        elif request.path == b"/204":
            request.respond(204, [], b"")
        else:
            await echo(request)

    async def main() -> None:
        async with serving(handler) as (server, _), peer(server.port) as client:
            client.send(b"HEAD /abc HTTP/1.1\r\nhost: a\r\n\r\n")
            _, headers, _ = await client.answer(to_head=True)
            assert headers[b"content-length"] == b"11"
            client.send(b"HEAD /stream HTTP/1.1\r\nhost: a\r\n\r\n")
            await client.answer(to_head=True)
            client.send(b"GET /204 HTTP/1.1\r\nhost: a\r\n\r\n")
            status, headers, _ = await client.answer()
            assert (status, b"content-length" in headers) == (204, False)
            client.send(GET)
            assert (await client.answer())[2] == b"GET|/x||"

    run(main())


def test_big_bodies_both_ways(run: Run) -> None:
    async def main() -> None:
        body = bytes(range(256)) * (4 << 12)
        async with serving() as (server, _), peer(server.port) as client:
            client.send(b"POST /b HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            assert (await client.answer())[2] == b"POST|/b||" + body
            # In thousands of pieces.
            client.send(b"POST /b HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
            for start in range(0, 1 << 20, 1000):
                piece = body[start : start + 1000]
                client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
                if start % 64_000 == 0:
                    await client.writer.drain()
                    await asyncio.sleep(0)
            client.send(b"0\r\n\r\n")
            assert (await client.answer())[2] == b"POST|/b||" + body[:1_049_000]

    run(main())


def test_streaming_answers_are_chunked_and_empty_writes_do_not_end_them(run: Run) -> None:
    async def handler(request: HttpRequest) -> None:
        request.start(201, header_block([(b"content-type", b"text/event-stream")]))
        for piece in (b"data: 1\n\n", b"", b"data: 2\n\n"):
            request.write(piece)
            await asyncio.sleep(0)
        request.finish()
        assert request.finished
        with pytest.raises(RuntimeError):
            request.write(b"too late")

    async def main() -> None:
        async with serving(handler) as (server, _), peer(server.port) as client:
            for _ in range(2):
                client.send(GET)
                status, headers, body = await client.answer()
                assert (status, body) == (201, b"data: 1\n\ndata: 2\n\n")
                assert headers[b"content-type"] == b"text/event-stream"

    run(main())


def test_a_header_with_a_line_break_is_never_written() -> None:
    for value in (b"a\r\nset-cookie: x", b"a\nb", b"a\rb"):
        with pytest.raises(ValueError, match="line break"):
            header_block([(b"x", value)])


def test_a_failing_handler_is_a_500_or_a_cut_and_is_logged_once(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def handler(request: HttpRequest) -> None:
        if request.path == b"/late":
            request.start(200, [])
            request.write(b"x")
        if request.path != b"/silent":
            raise ValueError("secret")

    async def main() -> None:
        async with serving(handler) as (server, bad), peer(server.port) as client:
            for path in (b"/early", b"/silent"):
                client.send(b"GET %b HTTP/1.1\r\nhost: a\r\n\r\n" % path)
                status, headers, body = await client.answer()
                assert (status, headers[b"content-type"]) == (500, b"application/json")
                assert json.loads(body)["error"]["type"] == "server_error"
                assert b"secret" not in body
            client.send(b"GET /late HTTP/1.1\r\nhost: a\r\n\r\n")
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError, ValueError)):
                await client.answer()
            await until(lambda: server.num_running == 0)
            assert bad == []
        errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert [record.getMessage() for record in errors] == [
            "handler_failed",
            "handler_did_not_answer",
            "handler_failed",
        ]

    run(main())


def test_a_drain_closes_only_connections_whose_answer_said_so(run: Run) -> None:
    """A proxy sends another request on a connection that was to be kept. If it is closed under it, that request is lost."""

    async def main() -> None:
        gate = asyncio.Event()

        async def handler(request: HttpRequest) -> None:
            if request.path != b"/stream":
                await echo(request)
                return
            request.start(200, header_block([]))
            request.write(b"a")
            await gate.wait()
            request.finish()

        async with asyncio.timeout(LONG_S), serving(handler) as (server, _), peer(server.port) as client:
            client.send(b"GET /stream HTTP/1.1\r\nhost: a\r\n\r\n")
            await client.reader.readuntil(b"a\r\n")
            server.begin_drain()
            gate.set()
            await client.reader.readuntil(b"0\r\n\r\n")
            client.send(GET)
            status, headers, _ = await client.answer()
            assert (status, headers[b"connection"]) == (200, b"close")
            assert await client.closed()
            async with peer(server.port) as another:
                another.send(GET)
                assert (await another.answer())[0] == 200

    run(main())


def test_close_lets_running_exchanges_end_and_idle_ones_go(run: Run) -> None:
    async def main() -> None:
        gate = asyncio.Event()

        async def handler(request: HttpRequest) -> None:
            if request.path == b"/wait":
                await gate.wait()
            await echo(request)

        async with serving(handler) as (server, _), peer(server.port) as idle, peer(server.port) as busy:
            idle.send(GET)
            await idle.answer()
            busy.send(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n")
            await until(lambda: server.num_running == 1)
            port = server.port
            closing = asyncio.ensure_future(server.close(2 * LONG_S))
            assert await idle.closed()
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", port)
            gate.set()
            _, headers, body = await busy.answer()
            assert (headers[b"connection"], body) == (b"close", b"GET|/wait||")
            await asyncio.wait_for(closing, LONG_S)

    run(main())


def test_close_cuts_what_does_not_end_in_time(run: Run) -> None:
    ended = []

    async def main() -> None:
        async def handler(request: HttpRequest) -> None:
            gone = asyncio.Event()
            request.on_gone = gone.set
            try:
                await (gone.wait() if request.path == b"/polite" else asyncio.sleep(60))
            finally:
                ended.append(request.path)

        async with serving(handler) as (server, _), peer(server.port) as one, peer(server.port) as two:
            one.send(b"GET /polite HTTP/1.1\r\nhost: a\r\n\r\n")
            two.send(b"GET /deaf HTTP/1.1\r\nhost: a\r\n\r\n")
            await until(lambda: server.num_running == 2)
            await server.close(0.05)
            assert sorted(ended) == [b"/deaf", b"/polite"]
            assert server.num_running == 0

    run(main())

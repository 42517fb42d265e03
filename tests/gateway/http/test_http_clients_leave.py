"""Clients that disconnect, stall, or read slowly: the handler is notified once, and memory stays bounded."""

from __future__ import annotations

import asyncio
import socket
import struct
import time

import pytest
from waiting import LONG_S, settled, turns, until
from wire import GET, Run, peer, serving

from stoker.gateway.http import HttpRequest, ServerLimits


class Watched:
    """A handler that waits in a given phase and counts its notifications."""

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.num_gone = 0
        self.requests: list[HttpRequest] = []

    async def __call__(self, request: HttpRequest) -> None:
        self.requests.append(request)
        left = asyncio.Event()

        def on_gone() -> None:
            self.num_gone += 1
            left.set()

        request.on_gone = on_gone
        if self.phase != "queued":
            request.start(200, [(b"content-type", b"text/event-stream")])
        if self.phase == "streaming":
            request.write(b"data: 1\n\n")
        await left.wait()
        assert request.gone
        # None of these may do anything, or fail, once the client is gone.
        request.write(b"more")
        request.finish()
        request.abort()
        request.respond(200, [], b"")


@pytest.mark.parametrize("phase", ["queued", "started", "streaming"])
@pytest.mark.parametrize("how", ["close", "half-close, then close", "reset"])
def test_a_disconnect_is_reported_once(run: Run, phase: str, how: str) -> None:
    async def main() -> None:
        watched = Watched(phase)
        async with serving(watched) as (server, bad), peer(server.port) as client:
            client.send(GET)
            await until(lambda: bool(watched.requests))
            if phase != "queued":
                await client.reader.readuntil(b"\r\n\r\n")
            if how != "reset":
                if how != "close":
                    client.writer.write_eof()
                    await turns()
                    assert server.num_running == 1
                client.writer.close()
            else:
                sock = client.writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.writer.transport.abort()
            await until(lambda: server.num_running == 0 and server.num_connections == 0)
            assert (watched.num_gone, bad) == (1, [])
            assert watched.requests[0].gone
            assert not watched.requests[0].finished

    run(main())


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /x HT", b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nabc"],
    ids=["idle", "head", "body"],
)
def test_a_client_that_disconnects_before_its_request_is_complete_reaches_no_handler(run: Run, sent: bytes) -> None:
    async def main() -> None:
        watched = Watched("queued")
        async with serving(watched) as (server, bad):
            async with peer(server.port) as client:
                client.send(sent)
                await until(lambda: server.num_connections == 1)
                (connection,) = server._connections
                await until(lambda: connection.idle != bool(sent))  # it has read the input
            await until(lambda: server.num_connections == 0)
            assert (watched.requests, bad) == ([], [])

    run(main())


def test_a_disconnect_after_the_response_is_not_reported(run: Run) -> None:
    calls = []

    async def main() -> None:
        left = asyncio.Event()

        async def handler(request: HttpRequest) -> None:
            request.on_gone = lambda: calls.append("gone")
            request.respond(200, [], b"")
            await left.wait()

        async with serving(handler) as (server, _):
            async with peer(server.port) as client:
                client.send(GET)
                await client.answer()
            await until(lambda: server.num_connections == 0)
            left.set()
            await until(lambda: server.num_running == 0)
        assert calls == []

    run(main())


def test_abort_cuts_the_connection_and_does_not_call_on_gone(run: Run) -> None:
    calls = []

    async def main() -> None:
        arrived = asyncio.Event()

        async def handler(request: HttpRequest) -> None:
            request.on_gone = lambda: calls.append("gone")
            request.start(200, [])
            request.write(b"x")
            await arrived.wait()
            request.abort()
            assert request.gone

        async with serving(handler) as (server, _), peer(server.port) as client:
            client.send(GET)
            await client.reader.readuntil(b"\r\n\r\n")
            assert await client.reader.readexactly(6) == b"1\r\nx\r\n"
            arrived.set()
            assert await client.closed()
            await until(lambda: server.num_connections == 0)
        assert calls == []

    run(main())


def test_a_slow_reader_pauses_the_writer_and_memory_stays_bounded(run: Run) -> None:
    seen: list[str] = []
    most = 0

    async def handler(request: HttpRequest) -> None:
        nonlocal most
        go = asyncio.Event()
        go.set()

        def pause() -> None:
            seen.append("pause")
            go.clear()

        def resume() -> None:
            seen.append("resume")
            go.set()

        request.on_pause, request.on_resume = pause, resume
        request.start(200, [])
        for _ in range(3000):
            await go.wait()
            request.write(b"x" * 10_000)
            most = max(most, request._transport.get_write_buffer_size())
        request.finish()

    async def main() -> None:
        async with serving(handler) as (server, _), peer(server.port) as client:
            client.send(GET)
            await until(lambda: "pause" in seen)
            assert await settled(lambda: len(seen)) == 1
            _, _, body = await client.answer()
            assert len(body) == 30_000_000
        assert seen.count("pause") > 1
        assert abs(seen.count("pause") - seen.count("resume")) <= 1
        assert most < 200_000

    run(main())


def test_a_stalled_reader_is_cut(run: Run) -> None:
    async def main() -> None:
        gone = asyncio.Event()

        async def handler(request: HttpRequest) -> None:
            request.on_gone = gone.set
            request.start(200, [])
            while not request.paused:
                request.write(b"x" * 100_000)
                await asyncio.sleep(0)
            await gone.wait()

        async with serving(handler, ServerLimits(write_stall_s=0.2)) as (server, _), peer(server.port) as client:
            client.stop_reading()
            client.send(GET)
            await asyncio.wait_for(gone.wait(), LONG_S)
            await until(lambda: server.num_connections == 0)

    run(main())


def test_a_stalled_reader_of_a_finished_answer_is_cut_too(run: Run) -> None:
    async def handler(request: HttpRequest) -> None:
        request.respond(200, [], b"x" * (64 << 20))

    async def main() -> None:
        async with serving(handler, ServerLimits(write_stall_s=0.2)) as (server, _), peer(server.port) as client:
            client.stop_reading()
            client.send(GET)
            await until(lambda: server.num_connections == 1)
            await until(lambda: server.num_connections == 0)

    run(main())


POST = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 99999\r\n\r\n"
CHUNKED = b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("limits", "first", "then", "what"),
    [
        (ServerLimits(head_s=0.2), b"GET /x", b"a", "head"),
        (ServerLimits(body_s=0.2), CHUNKED, b"1\r\nx\r\n", "body was not"),
        (ServerLimits(body_idle_s=0.2), POST, b"", "no byte of the request body"),
        (ServerLimits(body_s=0.2), POST, b"a", "body was not"),
    ],
    ids=["head", "chunks", "idle body", "body"],
)
def test_slow_requests_are_a_408(run: Run, limits: ServerLimits, first: bytes, then: bytes, what: str) -> None:
    async def main() -> None:
        watched = Watched("queued")
        async with serving(watched, limits) as (server, bad), peer(server.port) as client:

            async def trickle() -> None:
                client.send(first)
                while True:
                    await asyncio.sleep(0.02)
                    client.send(then)

            trickling = asyncio.ensure_future(trickle())
            assert (await client.answer())[0] == 408
            trickling.cancel()
            assert len(bad) == 1
            assert what in bad[0]
            assert watched.requests == []

    run(main())


def test_idle_connections_are_closed_but_not_early(run: Run) -> None:
    async def main() -> None:
        watched = Watched("queued")
        async with serving(watched, ServerLimits(keepalive_s=0.3)) as (server, bad), peer(server.port) as client:
            began = asyncio.get_running_loop().time()
            assert await client.closed()
            assert asyncio.get_running_loop().time() - began >= 0.3
            assert bad == []

    run(main())


@pytest.mark.parametrize("sent", [b"GET /x HTTP/1.1\r\n", POST, b""], ids=["head", "body", "idle"])
def test_time_in_which_the_server_was_stopped_does_not_count_against_clients(run: Run, sent: bytes) -> None:
    async def main() -> None:
        limits = ServerLimits(head_s=0.2, body_idle_s=0.2, body_s=0.2, keepalive_s=0.2)
        async with serving(limits=limits) as (server, bad), peer(server.port) as client:
            client.send(sent)
            await until(lambda: server.num_connections == 1)
            (connection,) = server._connections
            await until(lambda: connection.idle != bool(sent))
            time.sleep(0.6)  # noqa: ASYNC251 - stops the whole process
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert (server.num_connections, bad) == (1, [])

    run(main())

"""A client that closes its sending side and still reads gets its answer; one that has closed completely is noticed."""

from __future__ import annotations

import asyncio

import pytest
from waiting import LONG_S, turns, until
from wire import GET, Peer, Run, echo, peer, serving

from stoker.gateway.http import HttpRequest, ServerLimits, half_closed

POST = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhello"
SSE = [(b"content-type", b"text/event-stream")]
AT_ONCE = ServerLimits(half_closed_probe_s=0.01)


def half_close(client: Peer, data: bytes) -> None:
    client.send(data)
    client.writer.write_eof()


async def all_of(client: Peer) -> bytes:
    async with asyncio.timeout(LONG_S):
        return await client.reader.read()


@pytest.mark.parametrize("count", [1, 3])
def test_half_closed_requests_get_their_answers(run: Run, count: int) -> None:
    async def slow(request: HttpRequest) -> None:
        await turns(3)
        await echo(request)

    async def main() -> None:
        async with (
            serving(slow, ServerLimits(half_closed_probe_s=LONG_S)) as (server, bad),
            peer(server.port) as client,
        ):
            half_close(client, POST * count)
            for _ in range(count):
                assert (await client.answer())[2] == b"POST|/x||hello"
            assert await client.closed()
            await until(lambda: server.num_connections == 0)
            assert bad == []

    run(main())


@pytest.mark.parametrize("behind", [b"GET /x HT", b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhel"])
def test_an_incomplete_request_behind_a_half_closed_one_ends_the_connection(run: Run, behind: bytes) -> None:
    async def main() -> None:
        async with serving() as (server, bad), peer(server.port) as client:
            half_close(client, POST + behind)
            assert (await client.answer())[0] == 200
            assert await client.closed()
            await until(lambda: server.num_connections == 0)
            assert (bad, server.bodies.held_bytes) == ([], 0)

    run(main())


def test_a_long_half_closed_request_is_probed_with_interim_responses(run: Run) -> None:
    async def main() -> None:
        go = asyncio.Event()

        async def handler(request: HttpRequest) -> None:
            await go.wait()
            await echo(request)

        async with serving(handler, AT_ONCE) as (server, _), peer(server.port) as client:
            half_close(client, POST)
            assert (await client.answer())[0] == 100
            go.set()
            assert (await client.answer())[2] == b"POST|/x||hello"
            assert await client.closed()

    run(main())


def test_a_half_closed_stream_is_probed_only_between_two_events(run: Run) -> None:
    async def main() -> None:
        go = asyncio.Event()

        async def handler(request: HttpRequest) -> None:
            request.start(200, SSE)
            await go.wait()
            request.write(b"data: he")
            request.probe()
            request.write(b"llo\n\n")
            request.probe()
            request.write(b"data: end\n\n")
            request.finish()

        async with serving(handler, AT_ONCE) as (server, _), peer(server.port) as client:
            half_close(client, GET)
            assert b"200 OK" in await client.reader.readuntil(b"\r\n\r\n")
            assert await client.reader.readexactly(8) == b"3\r\n:\n\n\r\n"
            go.set()
            rest = await all_of(client)
            assert rest.replace(b"3\r\n:\n\n\r\n", b"|") == (
                b"8\r\ndata: he\r\n5\r\nllo\n\n\r\n|b\r\ndata: end\n\n\r\n0\r\n\r\n"
            )

    run(main())


def test_a_client_that_closes_after_its_half_close_is_noticed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_closed, "_LOOKS_PER_PROBE", 1)

    async def main() -> None:
        gone = asyncio.Event()

        async def handler(request: HttpRequest) -> None:
            request.on_gone = gone.set
            await gone.wait()

        async with serving(handler, AT_ONCE) as (server, _), peer(server.port) as client:
            half_close(client, POST)
            assert (await client.answer())[0] == 100
            client.writer.close()
            await asyncio.wait_for(gone.wait(), LONG_S)
            await until(lambda: server.num_connections == 0)

    run(main())

"""The HTTP client: connection reuse, stale connections, deadlines, cancellation and abort."""

from __future__ import annotations

import asyncio
import socket
import time
from types import SimpleNamespace

import pytest
from waiting import LONG_S, until
from wire import FakeWorker, Run, get, text, worker_saying

from stoker.base.errors import ConfigError
from stoker.gateway.http import (
    ClientLimits,
    ConnectionPool,
    ConnectTimeout,
    Origin,
    ResponseAborted,
    ResponseLost,
    Unreachable,
    end_to_end,
)

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A:  b \r\n\r\nok"
SSE = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def test_requests_reuse_one_connection(run: Run) -> None:
    async def main() -> None:
        worker = worker_saying(OK, OK, OK)
        async with worker.up() as pool:
            for _ in range(3):
                answer = await get(pool, b"POST", body=b"abc")
                assert (answer.status, answer.header(b"x-a"), answer.header(b"none")) == (200, b"b", None)
                assert await answer.read(10) == b"ok"
                assert (pool.num_open, pool.num_idle) == (1, 1)
            assert worker.num_connections == 1
            host = pool.origin.authority
            assert worker.requests[0] == b"POST /p HTTP/1.1\r\nhost: %b\r\ncontent-length: 3\r\nx-h: 1\r\n\r\n" % host

    run(main())


def test_the_connection_used_last_is_used_next(run: Run) -> None:
    async def main() -> None:
        worker = worker_saying(*[OK] * 5)
        async with worker.up() as pool:
            await asyncio.gather(text(pool), text(pool), text(pool))
            assert (worker.num_connections, pool.num_idle) == (3, 3)
            last = pool._idle[-1]
            await text(pool)
            assert pool._idle[-1] is last

    run(main())


def test_idle_connections_are_dropped(run: Run) -> None:
    async def main() -> None:
        worker = worker_saying(OK, OK)
        async with worker.up(ClientLimits(idle_s=0.1, sweep_s=0.02)) as pool:
            await text(pool)
            assert pool.num_open == 1
            await until(lambda: pool.num_open == 0)
            assert pool._sweeper is None
            assert await text(pool) == b"ok"

    run(main())


@pytest.mark.parametrize("noticed", [True, False], ids=["eof", "reset"])
def test_a_stale_connection_is_retried_silently(run: Run, noticed: bool) -> None:
    """`noticed`: the pool knows that the worker closed the idle connection. Otherwise it closes when the next request arrives."""

    async def main() -> None:
        async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await worker.request(reader)
            writer.write(OK)
            if not noticed:
                await worker.request(reader)
                writer.transport.abort()

        worker = FakeWorker(play)
        async with worker.up() as pool:
            assert await text(pool) == b"ok"
            if noticed:
                await until(lambda: pool.num_open == 0)
            assert await text(pool) == b"ok"
            assert worker.num_connections == 2

    run(main())


def test_a_new_connection_that_dies_is_not_retried(run: Run) -> None:
    async def main() -> None:
        worker = worker_saying(b"", then_close=True)
        async with worker.up() as pool:
            with pytest.raises(ResponseLost, match="before a response"):
                await get(pool)
            assert worker.num_connections == 1

    run(main())


def test_half_an_answer_on_a_reused_connection_is_not_retried(run: Run) -> None:
    async def main() -> None:
        worker = worker_saying(OK, b"HTTP/1.1 200", then_close=True)
        async with worker.up() as pool:
            await text(pool)
            with pytest.raises(ResponseLost):
                await get(pool)
            assert worker.num_connections == 1

    run(main())


def test_a_closed_port_is_unreachable_at_once(run: Run) -> None:
    async def main() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            pool = ConnectionPool(Origin.from_url(f"http://127.0.0.1:{taken.getsockname()[1]}"), ClientLimits())
            with pytest.raises(Unreachable, match=r"[Rr]efused|Connect call failed"):  # and not "no connection within"
                await get(pool)
            assert pool.num_open == 0

    run(main())


def test_a_connect_that_hangs_is_unreachable_in_time(run: Run) -> None:
    async def main() -> None:
        # A full backlog: further handshakes are not answered.
        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))
            deaf.listen(0)
            fillers = []
            for _ in range(4):
                filler = socket.socket()
                filler.setblocking(False)
                filler.connect_ex(deaf.getsockname())
                fillers.append(filler)
            pool = ConnectionPool(Origin.from_url(f"http://127.0.0.1:{deaf.getsockname()[1]}"), ClientLimits())
            with pytest.raises(ConnectTimeout, match=r"within 0\.1 s"):
                await pool.send(b"GET", b"/", [], b"", connect_s=0.1, head_s=None)
            for filler in fillers:
                filler.close()

    run(main())


def test_a_head_that_does_not_come_is_lost_in_time(run: Run) -> None:
    async def main() -> None:
        for said in (b"", b"HTTP/1.1 200 OK\r\nX-", b"HTTP/1.1 100 Continue\r\n\r\n"):
            worker = worker_saying(said)
            async with worker.up(ClientLimits(sweep_s=0.02)) as pool:
                began = time.monotonic()
                with pytest.raises(ResponseLost, match="before the deadline"):
                    await get(pool, head_s=0.1)
                assert 0.1 <= time.monotonic() - began < LONG_S
                await until(lambda: pool.num_open == 0)

    run(main())


def test_the_head_deadline_does_not_bound_the_body(run: Run) -> None:
    async def main() -> None:
        deadline_passed = asyncio.Event()

        async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await worker.request(reader)
            writer.write(OK[:-2])
            await deadline_passed.wait()
            writer.write(b"ok")

        worker = FakeWorker(play)
        async with worker.up() as pool:
            answer = await get(pool)
            loop = pool._loop
            late = SimpleNamespace(time=lambda: loop.time() + 2 * LONG_S, call_later=loop.call_later)
            pool._loop = late  # type: ignore[assignment]
            pool._sweep()
            deadline_passed.set()
            assert await answer.read(10) == b"ok"

    run(main())


@pytest.mark.parametrize(
    "said",
    [
        OK[:-1],
        SSE + b"5\r\nhel",
        SSE + b"5\r\nhello\r\n",
        SSE + b"5\r\nhello\r\n0\r\n",
        SSE + b"5\r\nhello",
    ],
)
def test_an_answer_cut_short_is_lost(run: Run, said: bytes) -> None:
    async def main() -> None:
        worker = worker_saying(said, then_close=True)
        async with worker.up() as pool:
            answer = await get(pool)
            with pytest.raises(ResponseLost, match="mid-response"):
                await answer.read(100)
            await until(lambda: pool.num_open == 0)

    run(main())


def test_relay_brings_pieces_as_they_come_and_what_came_before_the_cut(run: Run) -> None:
    async def main() -> None:
        async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await worker.request(reader)
            writer.write(SSE + b"3\r\none\r\n")
            await until(lambda: len(pieces) == 1)
            writer.write(b"3\r\ntwo\r\n5\r\nthree\r\n")
            await until(lambda: len(pieces) == 2)
            writer.transport.abort()

        pieces: list[bytes] = []
        worker = FakeWorker(play)
        async with worker.up() as pool:
            with pytest.raises(ResponseLost):
                await (await get(pool)).relay(pieces.append)
            assert pieces == [b"one", b"twothree"]

    run(main())


def test_abort_closes_at_once(run: Run) -> None:
    async def main() -> None:
        seen = asyncio.Event()
        relayed = asyncio.Event()

        async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await worker.request(reader)
            writer.write(SSE + b"3\r\none\r\n")
            await reader.read()
            seen.set()

        worker = FakeWorker(play)
        async with worker.up() as pool:
            answer = await get(pool)
            relaying = asyncio.ensure_future(answer.relay(lambda data: relayed.set()))
            await relayed.wait()
            answer.abort()
            answer.abort()
            with pytest.raises(ResponseAborted):
                await relaying
            await asyncio.wait_for(seen.wait(), LONG_S)
            with pytest.raises(ResponseAborted):
                await answer.read(10)
            await until(lambda: pool.num_open == 0)

    run(main())


def test_abort_after_the_end_has_no_effect(run: Run) -> None:
    async def main() -> None:
        worker = worker_saying(OK, OK)
        async with worker.up() as pool:
            answer = await get(pool)
            assert await answer.read(10) == b"ok"
            answer.abort()
            answer.pause()
            assert await text(pool) == b"ok"
            assert worker.num_connections == 1

    run(main())


def test_cancelling_the_waiting_task_closes_the_connection(run: Run) -> None:
    async def main() -> None:
        worker = worker_saying(b"")
        async with worker.up() as pool:
            waiting = asyncio.ensure_future(get(pool))
            await until(lambda: bool(worker.requests))
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await until(lambda: pool.num_open == 0)
        worker = worker_saying(SSE)
        async with worker.up() as pool:
            answer = await get(pool)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(answer.relay(lambda data: None), 0.01)
            await until(lambda: pool.num_open == 0)

    run(main())


def test_a_cancel_in_the_same_turn_as_the_response_does_not_cut_the_next_request(run: Run) -> None:
    """The response is complete and its connection already serves another request when the sender is cancelled."""

    async def main() -> None:
        worker = worker_saying(OK, OK, OK)
        async with worker.up() as pool:
            await text(pool)
            first = asyncio.ensure_future(get(pool))
            await asyncio.sleep(0)
            (connection,) = pool._open
            waiter = connection._waiter
            assert waiter is not None
            others: list[asyncio.Future[bytes]] = []

            def answered(_: object) -> None:
                others.append(asyncio.ensure_future(text(pool)))
                asyncio.get_running_loop().call_soon(first.cancel)

            waiter.add_done_callback(answered)
            await asyncio.wait([first])
            await until(lambda: bool(others))
            assert await others[0] == b"ok"

    run(main())


def test_a_response_in_the_same_turn_as_the_cancel_is_dropped_without_harm(run: Run) -> None:
    """As above in the other order: the sender is cancelled, and the response arrives before its task runs."""

    async def main() -> None:
        worker = worker_saying(OK, OK)
        async with worker.up() as pool:
            await text(pool)
            first = asyncio.ensure_future(get(pool))
            await asyncio.sleep(0)
            (connection,) = pool._open
            other = asyncio.ensure_future(text(pool))  # it runs before the cancelled task
            first.cancel()
            connection.data_received(OK)
            async with asyncio.timeout(LONG_S):
                assert await other == b"ok"
            with pytest.raises(asyncio.CancelledError):
                await first

    run(main())


def test_a_closed_pool_ends_idle_connections_and_lets_answers_end(run: Run) -> None:
    async def main() -> None:
        async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await worker.request(reader)
            writer.write(SSE)
            await pool_closed.wait()
            writer.write(b"2\r\nok\r\n0\r\n\r\n")
            await reader.read()

        pool_closed = asyncio.Event()
        worker = FakeWorker(play)
        async with worker.up() as pool:
            answer = await get(pool)
            pool.close()
            pool_closed.set()
            assert await answer.read(10) == b"ok"
            await until(lambda: pool.num_open == 0)
            with pytest.raises(Unreachable, match="removed"):
                await get(pool)

    run(main())


def test_origins() -> None:
    origin = Origin.from_url("http://h:81")
    assert (origin.host, origin.port, origin.ssl, origin.authority, str(origin)) == (
        "h",
        81,
        None,
        b"h:81",
        "http://h:81",
    )
    assert Origin.from_url("https://h").port == 443
    assert Origin.from_url("https://h").ssl is not None
    assert Origin.from_url("http://[::1]:5/").authority == b"[::1]:5"
    assert Origin.from_url("http://h/base/").prefix == b"/base"
    for bad in (
        "h:81",
        "ftp://h",
        "http://",
        "http://h:x",
        "http://h:99999",
        "http://u:p@h",
        "http://h/?a",
        "http://h\n",
    ):
        with pytest.raises(ConfigError):
            Origin.from_url(bad)


def test_only_end_to_end_headers_are_handed_on() -> None:
    headers = [
        (b"connection", b"close, X-Private"),
        (b"x-private", b"1"),
        (b"te", b"trailers"),
        (b"content-type", b"a"),
    ]
    headers += [(b"content-length", b"5"), (b"transfer-encoding", b"chunked"), (b"host", b"h"), (b"x-b", b"2")]
    assert end_to_end(headers) == [(b"content-type", b"a"), (b"x-b", b"2")]

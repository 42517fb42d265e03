"""What a connection may cost: the decision from the head, the budget for bodies, chunk framing, and connections."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from waiting import turns, until
from wire import GET, Bad, Run, ask, echo, peer, serving

from stoker.gateway.http import PUBLIC, BodyGrant, HeadRefusal, HttpRequest, RequestHead, Server, ServerLimits
from stoker.gateway.http.body_budget import BodyBudget
from stoker.gateway.http.errors import BadMessage
from stoker.gateway.http.head import CHUNKED
from stoker.gateway.http.open_connections import AddressGroups, OpenConnections
from stoker.gateway.http.request_body import RequestBody
from stoker.gateway.http.unread_answers import UnreadAnswers

MIB = 1 << 20


def post(length: int, key: bytes = b"k", more: bytes = b"") -> bytes:
    return b"POST /x HTTP/1.1\r\nhost: a\r\nx-key: %b\r\n%bcontent-length: %d\r\n\r\n" % (key, more, length)


def gate(head: RequestHead, peer: str) -> BodyGrant | HeadRefusal:
    """Lets `x-key` in as its own account; requests without one are public."""
    key = head.header(b"x-key")
    if key == b"wrong":
        return HeadRefusal(401, [(b"www-authenticate", b"Bearer")], b"no")
    return BodyGrant(1000, account=PUBLIC) if key is None else BodyGrant(4 * MIB, key, key.decode())


@contextlib.asynccontextmanager
async def gated(handler=echo, **limits):  # type: ignore[no-untyped-def]
    bad = Bad()
    server = Server(handler, ServerLimits(**limits), on_bad=bad, gate=gate)
    await server.listen("127.0.0.1", 0)
    try:
        yield server, bad
    finally:
        await server.close(0)
        assert server.bodies.held_bytes == 0


# ---- the decision from the head


@pytest.mark.parametrize("more", [b"", b"expect: 100-continue\r\n"])
def test_a_refusal_comes_before_the_body(run: Run, more: bytes) -> None:
    reached: list[HttpRequest] = []

    async def handler(request: HttpRequest) -> None:
        reached.append(request)

    async def main() -> None:
        async with gated(handler) as (server, _), peer(server.port) as client:
            client.send(post(60 * MIB, b"wrong", more))
            status, headers, body = await client.answer()
            assert (status, body) == (401, b"no")
            assert headers[b"www-authenticate"] == b"Bearer"
            assert headers[b"connection"] == b"close"
            client.send(b"0\r\n\r\n" + GET + bytes(8 * MIB))  # nothing behind the refused head is a request
            (connection,) = server._connections
            await until(lambda: connection._read_paused)  # some bytes were dropped, the others are not read
            assert connection._body is None
            assert (reached, server.bodies.held_bytes) == ([], 0)

    run(main())


def test_the_caller_is_passed_on_and_a_public_body_is_small(run: Run) -> None:
    callers = []

    async def handler(request: HttpRequest) -> None:
        callers.append(request.caller)
        await echo(request)

    async def main() -> None:
        async with gated(handler) as (server, _):
            assert (await ask(server.port, post(5) + b"hello"))[0] == 200
            assert (await ask(server.port, GET))[0] == 200
            assert (await ask(server.port, b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 1001\r\n\r\n"))[0] == 413
            assert callers == [b"k", None]

    run(main())


# ---- the budget for bodies


def test_bodies_beyond_the_budget_are_refused_and_every_byte_is_returned(run: Run) -> None:
    async def main() -> None:
        done = asyncio.Event()

        async def handler(request: HttpRequest) -> None:
            await done.wait()
            await echo(request)

        async with gated(handler, max_held_bytes=4 * MIB) as (server, bad), contextlib.AsyncExitStack() as stack:
            slow, served, chunky, other = [await stack.enter_async_context(peer(server.port)) for _ in range(4)]
            announced = await stack.enter_async_context(peer(server.port))
            announced.send(post(2 * MIB))  # no byte of it arrives, so it holds nothing
            await until(lambda: any(one._body is not None for one in server._connections))
            slow.send(post(MIB) + bytes(MIB - 1))  # the last byte never arrives
            served.send(post(MIB - 5000) + bytes(MIB - 5000))
            await until(lambda: server.bodies.held_bytes == 2 * MIB - 5000)
            refused = await ask(server.port, post(5001) + bytes(5001))
            assert refused[0] == 503
            assert refused[1][b"retry-after"] == b"1"
            assert json.loads(refused[2])["error"]["code"] == "overloaded"
            other.send(post(5, b"other") + b"hello")  # another account still has its share
            await until(lambda: server.num_running == 2)
            chunky.send(b"POST /x HTTP/1.1\r\nhost: a\r\nx-key: third\r\ntransfer-encoding: chunked\r\n\r\n")
            chunky.send(b"100000\r\n" + bytes(MIB) + b"\r\n" + b"100000\r\n" + bytes(MIB) + b"\r\n")
            assert (await chunky.answer())[0] == 503
            done.set()
            assert [len((await client.answer())[2]) for client in (served, other)] == [9 + MIB - 5000, 14]
            await slow.close()
            await until(lambda: server.bodies.held_bytes == 0)
            assert (await ask(server.port, post(2 * MIB) + bytes(2 * MIB)))[0] == 200
            assert len(bad) == 2

    run(main())


def test_clients_without_credentials_share_a_small_part_of_the_budget() -> None:
    budget = BodyBudget(16_000)
    assert budget.take(PUBLIC, 1000)
    assert not budget.take(PUBLIC, 1)
    assert budget.take("a", 8000)
    assert not budget.take("a", 1)
    assert budget.take("b", 7000)
    assert not budget.take("c", 1)
    for account, num_bytes in ((PUBLIC, 1000), ("a", 8000), ("b", 7000)):
        budget.give_back(account, num_bytes)
    assert (budget.held_bytes, budget._held) == (0, {})


def test_a_registration_passes_while_others_hold_all_that_the_public_may(run: Run) -> None:
    async def main() -> None:
        async with gated(max_held_bytes=16_000) as (server, _), peer(server.port) as client:
            client.send(b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n" + bytes(999))
            await until(lambda: server.bodies.held_bytes == 1000)
            assert (await ask(server.port, b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhello"))[0] == 200

    run(main())


# ---- chunk framing


def chunks(size: int, num: int) -> bytes:
    return b"%x\r\n%b\r\n" % (size, b"x" * size) * num


def test_a_storm_of_tiny_chunks_is_refused(run: Run) -> None:
    async def main() -> None:
        async with gated() as (server, bad), peer(server.port) as client:
            client.send(b"POST /x HTTP/1.1\r\nhost: a\r\nx-key: k\r\ntransfer-encoding: chunked\r\n\r\n")
            client.send(chunks(1, 5000))
            status, _, body = await client.answer()
            assert status == 400
            assert "larger chunks" in json.loads(body)["error"]["message"]
            assert len(bad) == 1

    run(main())


def test_parsing_many_chunks_lets_the_event_loop_run(run: Run) -> None:
    body = RequestBody(CHUNKED, BodyGrant(4 * MIB), "a", BodyBudget(16 * MIB))
    num_turns = 1
    body.feed(chunks(16, 50_000) + b"0\r\n\r\nnext")
    while body.tired:
        before = body._received
        body.go_on()
        num_turns += 1
        assert body._received - before <= 64 << 10
    assert (body.done, body.rest, body.joined()) == (True, b"next", b"x" * 800_000)
    assert num_turns > 20

    async def main() -> None:
        async with gated() as (server, _), peer(server.port) as client:
            client.send(b"POST /x HTTP/1.1\r\nhost: a\r\nx-key: k\r\ntransfer-encoding: chunked\r\n\r\n")
            client.send(chunks(16, 50_000) + b"0\r\n\r\n" + GET)
            assert len((await client.answer())[2]) == 800_009
            assert (await client.answer())[0] == 200

    run(main())


def test_a_few_tiny_chunks_and_large_ones_are_fine() -> None:
    for data in (chunks(1, 1000), chunks(100_000, 20), chunks(8, 2000)):
        body = RequestBody(CHUNKED, BodyGrant(4 * MIB), "a", BodyBudget(16 * MIB))
        body.feed(data + b"0\r\n\r\n")
        while body.tired:
            body.go_on()
        assert body.done
    with pytest.raises(BadMessage, match="chunk framing"):
        RequestBody(CHUNKED, BodyGrant(4 * MIB), "a", BodyBudget(16 * MIB)).feed(chunks(1, 3000))


# ---- connections


class Connection:
    def __init__(self, peer: str = "192.0.2.1") -> None:
        self.peer = peer
        self.group = ""
        self.num_cut = 0

    def cut(self) -> None:
        self.num_cut += 1


def test_one_address_does_not_get_all_connections() -> None:
    room = OpenConnections(1000, 3, ["10.0.0.0/8"])
    mine = [Connection() for _ in range(3)]
    assert [room.enter(one) for one in mine] == [None] * 3
    refused = room.enter(Connection())
    assert refused is not None
    assert refused.status == 429
    assert "at most 3" in refused.reason
    for address in ("192.0.2.2", "10.1.2.3", "127.0.0.1", "::1", ""):
        results = [room.enter(Connection(address)) for _ in range(4)]
        assert (results[3] is None) == (address != "192.0.2.2")
    flood = [Connection() for _ in range(100)]
    assert all(room.enter(one) is not None for one in flood)
    assert (flood[0].num_cut, flood[-1].num_cut) == (0, 1)  # beyond some, they get no answer


def test_an_ipv6_network_is_one_client() -> None:
    groups = AddressGroups(())
    assert groups.group("2001:db8::1") == groups.group("2001:db8::ffff:1") != groups.group("2001:db8:0:1::1")
    assert groups.group("::ffff:192.0.2.1") == groups.group("192.0.2.1")
    assert groups.group("fe80::1%eth0") == "fe80::/64"


def test_a_full_server_closes_the_longest_idle_connection_then_the_oldest_incomplete_head(run: Run) -> None:
    async def main() -> None:
        never = asyncio.Event()

        async def handler(request: HttpRequest) -> None:
            if request.path == b"/wait":
                request.on_gone = never.set
                await never.wait()
            else:
                await echo(request)

        async with serving(handler, ServerLimits(max_connections=3)) as (server, bad):
            async with contextlib.AsyncExitStack() as stack:
                starting, old, young = [await stack.enter_async_context(peer(server.port)) for _ in range(3)]
                starting.send(b"GET /x HT")
                for client in (old, young):
                    client.send(GET)
                    await client.answer()
                await until(lambda: len(server.connections.starting) == 1)
                for victim in (old, young, starting):
                    new = await stack.enter_async_context(peer(server.port))
                    new.send(GET.replace(b"/x", b"/wait"))
                    assert await victim.closed()
                await until(lambda: server.num_running == 3)
                refused = await stack.enter_async_context(peer(server.port))
                assert (await refused.answer())[0] == 503
                await turns()
                assert server.num_running == 3
            await until(lambda: server.num_connections == 0)
            assert len(bad) == 1
            assert (await ask(server.port, GET))[0] == 200

    run(main())


def test_a_full_server_closes_refused_connections_and_bodies_without_credentials(run: Run) -> None:
    async def main() -> None:
        async with gated(max_connections=3) as (server, _), contextlib.AsyncExitStack() as stack:
            slow, keyed, wrong = [await stack.enter_async_context(peer(server.port)) for _ in range(3)]
            slow.send(b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\nx")
            await until(lambda: len(server.connections.starting) == 1)
            keyed.send(post(1000) + b"x")
            wrong.send(post(1000, b"wrong"))
            assert (await wrong.answer())[0] == 401
            assert len(server.connections.refused) == 1
            for num_left in (2, 1):  # first the refused one goes, then the slow one
                new = await stack.enter_async_context(peer(server.port))
                new.send(post(1000) + b"x")
                await until(lambda: server.num_connections == 3 and server.bodies.held_bytes >= 2000)
                assert len(server.connections.starting) == num_left - 1
            assert await slow.closed()
            for _ in range(2):
                refused = await stack.enter_async_context(peer(server.port))
                assert (await refused.answer())[0] == 503
            keyed.send(b"x" * 999)
            assert (await keyed.answer())[0] == 200

    run(main())


class Reader:
    num_abandoned = 0

    def abandon(self) -> None:
        self.num_abandoned += 1


def test_unread_answers_beyond_the_budget_cost_the_longest_waiting_clients_of_the_same_account() -> None:
    unread = UnreadAnswers(100)
    other, *mine = [Reader() for _ in range(4)]
    unread.add(other, "other", 40)
    for one in mine:
        unread.add(one, "mine", 20)
    assert [one.num_abandoned for one in (other, *mine)] == [0, 1, 0, 0]
    assert unread.held_bytes == 80
    third = Reader()
    unread.add(third, "third", 30)
    assert (other.num_abandoned, unread.held_bytes) == (1, 70)  # the oldest of all
    whole = Reader()
    unread.add(whole, "mine", 1000)  # may exceed the budget alone
    assert [one.num_abandoned for one in (*mine, third, whole)] == [1, 1, 1, 1, 0]
    unread.remove(whole)
    unread.remove(whole)
    assert (unread.held_bytes, unread._by_account) == (0, {})


def test_clients_that_do_not_read_their_answers_hold_a_bounded_part_of_the_memory(run: Run) -> None:
    async def main() -> None:
        async def handler(request: HttpRequest) -> None:
            request.respond(200, [], bytes(32 * MIB))

        async with gated(handler, max_held_bytes=60 * MIB) as (server, _), contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(peer(server.port)) for _ in range(6)]
            for client in clients:
                client.stop_reading()
                client.send(post(1) + b"x")
            await until(lambda: 0 < server.unread.held_bytes <= 32 * MIB and server.num_connections < 6)
            assert len((await ask(server.port, post(1, b"other") + b"x"))[2]) == 32 * MIB
            for client in clients:
                client.writer.close()
            await until(lambda: server.num_connections == 0)
            assert server.unread.held_bytes == 0

    run(main())


def test_a_head_that_arrives_byte_by_byte_is_checked_as_a_whole(run: Run) -> None:
    async def main() -> None:
        async with serving() as (server, bad):
            for sent, status in ((GET, 200), (b"GET /x HTTP/1.1\r\nhost: a\nb: c\r\n\r\n", 400)):
                async with peer(server.port) as client:
                    for byte in sent:
                        client.send(bytes([byte]))
                        await asyncio.sleep(0)
                    assert (await client.answer())[0] == status
            assert len(bad) == 1

    run(main())

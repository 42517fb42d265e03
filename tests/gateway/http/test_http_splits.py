"""Splitting a stream anywhere does not change its meaning, and another parser reads accepted streams the same way."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import httptools
import pytest
from recording_transport import RecordingTransport
from waiting import until
from wire import Bad

from stoker.gateway.http import BadMessage, HttpRequest, Server, ServerLimits
from stoker.gateway.http.chunked import ChunkedReader
from stoker.gateway.http.client_connection import ClientConnection
from stoker.gateway.http.head import CHUNKED, HeadParser
from stoker.gateway.http.limits import ClientLimits
from stoker.gateway.http.worker_response import WorkerConnection, WorkerResponse

SEED = random.SystemRandom().randrange(1 << 32)


def pieces_of(stream: bytes, rng: random.Random) -> list[bytes]:
    """Split at random places: sometimes into single bytes, sometimes hardly at all."""
    style = rng.choice([1, 2, 7, 50, 1000])
    out = []
    at = 0
    while at < len(stream):
        step = rng.randint(1, style)
        out.append(stream[at : at + step])
        at += step
    return out


def random_request(rng: random.Random, number: int) -> bytes:
    line = b"%b /%d%b HTTP/1.1\r\nhost: a\r\n" % (rng.choice([b"GET", b"POST"]), number, rng.choice([b"", b"?q=%0d"]))
    line += b"".join(
        b"X-%d:%b%d%b\r\n" % (i, b" " * rng.randint(0, 2), i, b"\t" * rng.randint(0, 1))
        for i in range(rng.randint(0, 4))
    )
    body = rng.randbytes(rng.choice([0, 1, 5, 300]))
    kind = rng.random()
    if kind < 0.3:
        return line + b"\r\n"
    if kind < 0.6:
        return line + b"content-length: %d\r\n\r\n" % len(body) + body
    return line + b"transfer-encoding: chunked\r\n\r\n" + chunked(body, rng)


def chunked(body: bytes, rng: random.Random) -> bytes:
    out = b""
    at = 0
    while at < len(body):
        piece = body[at : at + rng.randint(1, 100)]
        at += len(piece)
        extension = rng.choice([b"", b"", b";a=b", b";x"])
        out += (b"%x%b\r\n%b\r\n" if rng.random() < 0.5 else b"%04X%b\r\n%b\r\n") % (len(piece), extension, piece)
    return out + b"0\r\n" + rng.choice([b"", b"x-sum: 5\r\n"]) + b"\r\n"


def mutate(stream: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(stream))
    kind = rng.random()
    if kind < 0.4:
        return stream[:at] + bytes([rng.choice(b"\r\n \t:;0a\x00,-+")]) + stream[at + 1 :]
    if kind < 0.7:
        return stream[:at] + rng.choice([b"\r", b"\n", b" ", b"\x00", b"\r\n", b"0", b"\r\n "]) + stream[at:]
    return stream[:at] + stream[at + rng.randint(1, 3) :]


async def served(pieces: list[bytes]) -> tuple[list[tuple[Any, ...]], list[str], bytes]:
    """What the server parsed from a stream that arrived in these pieces."""
    seen: list[tuple[Any, ...]] = []

    async def handler(request: HttpRequest) -> None:
        seen.append((request.method, request.path, request.query, tuple(request.headers), request.body))
        request.respond(200, [], b"%d" % len(seen))

    bad = Bad()
    bad.__class__ = type("AnyPeer", (Bad,), {"__call__": lambda self, peer, reason: self.append(reason)})
    server = Server(handler, ServerLimits(max_head_bytes=2000, max_body_bytes=5000), on_bad=bad)
    server.loop = asyncio.get_running_loop()
    wire = RecordingTransport()
    connection = ClientConnection(server)
    connection.connection_made(wire)
    for piece in pieces:
        connection.data_received(piece)
        if server.num_running:
            await asyncio.sleep(0)
    await until(lambda: server.num_running == 0)
    connection.connection_lost(None)
    return seen, list(bad), wire.written


def test_requests_mean_the_same_however_they_are_split() -> None:
    print("seed", SEED)
    rng = random.Random(SEED)

    async def main() -> None:
        for _ in range(150):
            stream = b"".join(random_request(rng, number) for number in range(rng.randint(1, 4)))
            broken = rng.random() < 0.4
            if broken:
                stream = mutate(stream, rng)
            whole = await served([stream])
            if not broken:
                assert whole[1] == []
            for _ in range(3):
                parts = pieces_of(stream, rng)
                got = await served(parts)
                # With more bytes, an invalid head may be refused for another reason, but it is refused.
                assert got[0] == whole[0], (SEED, stream, parts)
                assert bool(got[1]) == bool(whole[1]), (SEED, stream, parts)

    asyncio.run(main())


async def answered(pieces: list[bytes]) -> tuple[Any, ...]:
    class Nobody:
        heads = HeadParser(100)
        limits = ClientLimits()
        where = "worker"
        released = 0

        def release(self, connection: WorkerConnection) -> None:
            self.released += 1

        def forget(self, connection: WorkerConnection) -> None:
            pass

    owner = Nobody()
    connection = WorkerConnection(owner, asyncio.get_running_loop())
    connection.connection_made(RecordingTransport())
    waiter = connection.send(b"", b"", to_head=False, deadline=None)
    for piece in pieces:
        connection.data_received(piece)
    connection.connection_lost(None)
    try:
        answer = await waiter
        assert isinstance(answer, WorkerResponse)
        return answer.status, answer.headers, await answer.read(1 << 20), owner.released
    except Exception as lost:
        return (type(lost),)


def test_answers_mean_the_same_however_they_are_split() -> None:
    print("seed", SEED)
    rng = random.Random(SEED)

    async def main() -> None:
        for _ in range(200):
            body = rng.randbytes(rng.choice([0, 1, 5, 300, 3000]))
            stream = b"HTTP/1.1 100 Continue\r\n\r\n" * rng.randint(0, 2) + b"HTTP/1.1 200 OK\r\nX-A: b\r\n"
            kind = rng.random()
            if kind < 0.2:
                stream += b"\r\n" + body
            elif kind < 0.5:
                stream += b"content-length: %d\r\n\r\n" % len(body) + body
            else:
                stream += b"transfer-encoding: chunked\r\n\r\n" + chunked(body, rng)
            broken = rng.random() < 0.4
            if broken:
                stream = mutate(stream, rng)
            whole = await answered([stream])
            if not broken:
                assert whole[0] == 200
                assert whole[2] == body
            for _ in range(3):
                parts = pieces_of(stream, rng)
                # (Bytes after the end keep a connection from being reused, or close it later: [3] may differ.)
                got = await answered(parts)
                assert got[:3] == whole[:3], (SEED, stream, parts)
                assert broken or got == whole

    asyncio.run(main())


class Oracle:
    """The same bytes, read by httptools."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.url = self.body = b""
        self.complete = False
        self.parser = httptools.HttpRequestParser(self)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.complete:
            self.headers.append((name.lower(), value))

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


def test_whatever_we_accept_httptools_reads_as_we_do() -> None:
    """Request smuggling needs two parsers that disagree about one stream."""
    print("seed", SEED)
    rng = random.Random(SEED)
    heads = HeadParser(100)
    num_accepted = num_broken_accepted = 0
    for _ in range(6000):
        stream = random_request(rng, 1)
        broken = rng.random() < 0.8
        if broken:
            stream = mutate(stream, rng)
        end = stream.find(b"\r\n\r\n")
        if end < 0:
            continue
        try:
            head, length = heads.request(stream[:end])
            if length == CHUNKED:
                reader = ChunkedReader()
                body = reader.feed(stream[end + 4 :])
                whole = reader.done
                rest = reader.rest
            else:
                body = stream[end + 4 :][:length]
                whole = len(body) == length
                rest = stream[end + 4 + length :]
        except BadMessage:
            continue
        if not whole:
            continue
        oracle = Oracle()
        try:
            oracle.parser.feed_data(stream[: len(stream) - len(rest)])
        except httptools.HttpParserError:
            # httptools is stricter in a few harmless points, such as characters of header values.
            if not broken:
                raise
            continue
        num_accepted += 1
        num_broken_accepted += broken
        assert oracle.complete, (SEED, stream)
        assert oracle.parser.get_method() == head.method
        assert oracle.url == head.path + (b"?" + head.query if b"?" in oracle.url else b""), (SEED, stream)
        assert oracle.body == body, (SEED, stream)
        seen = [(name, value.rstrip(b" \t")) for name, value in oracle.headers if name != b"content-length"]
        assert seen[: len(head.headers)] == head.headers, (SEED, stream)  # the rest are trailers
        assert bool(oracle.parser.should_keep_alive()) == head.keep_alive, (SEED, stream)
    assert num_accepted > 1000
    assert num_broken_accepted > 100


def test_the_whole_chunk_fast_path_agrees_with_the_slow_path() -> None:
    rng = random.Random(SEED)
    for _ in range(2000):
        size = rng.choice([1, 2, 15, 16, 255, 4096])
        body = rng.randbytes(size)
        line = b"%x\r\n%b\r\n" % (size, body)
        if rng.random() < 0.5:
            line = mutate(line, rng)
        short, long = ChunkedReader(), ChunkedReader()
        results = []
        for feed in (short.feed, long._feed):
            try:
                results.append(feed(line))
            except BadMessage:
                results.append(b"bad")
        assert results[0] == results[1], (SEED, line)
        assert short._between == long._between or results[0] == b"bad", (SEED, line)
        assert (short._left, short._line, short.done) == (long._left, long._line, long.done) or results[0] == b"bad"


def test_nonsense_raises_nothing_but_bad_message() -> None:
    print("seed", SEED)
    rng = random.Random(SEED)
    heads = HeadParser(10)
    for _ in range(3000):
        data = rng.randbytes(rng.randint(1, 60)) if rng.random() < 0.5 else mutate(chunked(b"hello" * 9, rng), rng)
        reader = ChunkedReader()
        try:
            for piece in pieces_of(data, rng):
                if reader.done:
                    break
                reader.feed(piece)
        except BadMessage:
            pass
        with contextlib.suppress(BadMessage):
            heads.request(data)


def test_a_cached_head_does_not_accept_other_heads() -> None:
    """Heads are cached without the digits of their length; a head that differs in anything else is parsed again."""
    heads = HeadParser(10)
    good = b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nX-A: b"
    first, _ = heads.request(good)
    for digits, length in ((b"5", 5), (b"70000", 70000), (b"0", 0)):
        again, found = heads.request(good.replace(b"5", digits))
        assert again is first
        assert found == length
    assert (first.headers, first.by_name[b"x-a"]) == ([(b"host", b"h"), (b"x-a", b"b")], b"b")
    for other in (
        good + b"\r\nContent-Length: 5",
        good + b"\r\nContent-Length: 6",
        good + b"\r\nTransfer-Encoding: chunked",
        good.replace(b": 5", b": "),
        good.replace(b": 5", b": -5"),
        good.replace(b": 5", b": 5, 5"),
        good.replace(b": 5", b": 0x5"),
        good.replace(b"Host: h\r\n", b""),
        good.replace(b"Content-Length: 5", b"Content-Length : 5"),
    ):
        for _ in range(2):
            with pytest.raises(BadMessage):
                heads.request(other)
    without, length = heads.request(good.replace(b"\r\nContent-Length: 5", b""))
    assert without is not first
    assert length == 0
    spaced, length = heads.request(good.replace(b": 5", b":\t5 "))
    assert spaced is not first
    assert length == 5

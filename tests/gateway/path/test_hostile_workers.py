"""Hostile and broken workers, from a raw socket: bounded memory and time, and one clean error for the client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from mocks import DONE, chunk
from waiting import LONG_S
from world import PATIENT, Got, World

from stoker.base.ids import WorkerId
from stoker.fleet.spec import WorkerSpec
from stoker.gateway.path.errors import BadAnswer
from stoker.gateway.path.rewrite import EventCutter, ForeignAnswer

CHAT = b'{"model": "m", "messages": []}'
STREAM = b'{"model": "m", "stream": true, "messages": []}'
SMALL = replace(PATIENT, max_event_mib=1.0, max_notes_mib=1.0, max_answer_mib=1.0)

SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
UNTIL_CLOSE = SSE + b"\r\n"
CHUNKED = SSE + b"transfer-encoding: chunked\r\n\r\n"

Pieces = Callable[[], Iterator[bytes]]


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def repeated(first: bytes, piece: bytes, total: int) -> Pieces:
    """Return `first`, and then `piece` again and again until `total` bytes were sent."""

    def pieces() -> Iterator[bytes]:
        yield first
        for _ in range(total // len(piece)):
            yield piece

    return pieces


def once(*pieces: bytes) -> Pieces:
    return lambda: iter(pieces)


@contextlib.asynccontextmanager
async def raw_worker(pieces: Pieces, *, stays_open: bool = False) -> AsyncIterator[str]:
    """A server that reads a request's head and sends the pieces, whatever they are."""
    tasks: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces():
                writer.write(piece)
                await writer.drain()
            if stays_open:
                await asyncio.sleep(2 * LONG_S)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


async def ask(
    pieces: Pieces, body: bytes, dialect: str, *, stays_open: bool = False, proxy: Any = SMALL
) -> tuple[Got, World]:
    """Send `body` to a gateway whose only worker is a raw one."""
    async with raw_worker(pieces, stays_open=stays_open) as url, World(proxy=replace(proxy, retries=0)) as world:
        spec = WorkerSpec(worker_id=WorkerId("w"), url=url, dialect=dialect, models=("m",))
        world.fleet.add(spec, world.clock.now())
        async with asyncio.timeout(LONG_S):
            got = await world.ask(body)
        await world.settled()
        return got, world


def error_of(got: Got) -> dict[str, Any]:
    """Return the client's one error, from a response or from the end of a stream."""
    if got.status != 200:
        assert got.status == 502, got
        error = got.json["error"]
    else:
        assert got.body.endswith(b"\n\n")
        assert b"[DONE]" not in got.body
        *_, last = [line for line in got.body.split(b"\n") if line.startswith(b"data: ")]
        error = json.loads(last[6:])["error"]
        assert got.body.count(b'"error"') == 1
    assert "127.0.0.1" not in error["message"]
    assert error["code"] in ("worker_failed", "worker_lost", "answer_too_large")
    return error


LONG_TEXT = b"data: " + b"x" * 65536
NOTES = b":u 10 3 1000 1\n:t 0 5\n"

CASES: dict[str, tuple[Pieces, bytes]] = {
    "event without a newline": (repeated(UNTIL_CLOSE, LONG_TEXT, 60 << 20), STREAM),
    "event without a newline, in chunks": (repeated(CHUNKED, chunked(LONG_TEXT), 60 << 20), STREAM),
    "comment lines in one event": (repeated(UNTIL_CLOSE, b": comment\n" * 4096, 100 << 20), STREAM),
    "status 299": (once(b"HTTP/1.1 299 Odd\r\ncontent-length: 2\r\n\r\n{}"), CHAT),
    "status 204": (once(b"HTTP/1.1 204 No Content\r\n\r\n"), CHAT),
    "status 302": (once(b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1/\r\ncontent-length: 0\r\n\r\n"), STREAM),
    "status 600": (once(b"HTTP/1.1 600 What\r\ncontent-length: 0\r\n\r\n"), CHAT),
    "no final event": (once(UNTIL_CLOSE, chunk("a")), STREAM),
    "half an event": (once(UNTIL_CLOSE, chunk("a"), b'data: {"choices": [{"delta"'), STREAM),
    "invalid last chunk": (once(CHUNKED, chunked(chunk("a")), b"0\r\nnonsense\r\n\r\n"), STREAM),
    "chunk size beyond 64 bits": (once(CHUNKED, b"f" * 17 + b"\r\n"), STREAM),
    "chunk longer than its size": (once(CHUNKED, b"2\r\nabc\r\n"), STREAM),
    "chunk extensions": (repeated(CHUNKED, b"1;" + b"x" * 400 + b"\r\n:\r\n", 10 << 20), STREAM),
    "tiny chunks": (repeated(CHUNKED, b"1\r\nx\r\n" * 8192, 40 << 20), STREAM),
    "huge head": (repeated(b"HTTP/1.1 200 OK\r\n", b"x-filler: " + b"y" * 1000 + b"\r\n", 10 << 20), CHAT),
    "head of one line": (repeated(b"HTTP/1.1 200 ", b"O" * 4096, 10 << 20), CHAT),
    "endless 1xx": (repeated(b"", b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" * 20, 10 << 20), CHAT),
    "switching protocols": (once(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n"), CHAT),
    "not HTTP": (once(b"SSH-2.0-OpenSSH_9.2\r\n"), CHAT),
    "two lengths": (once(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}"), CHAT),
    "length and chunks": (once(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n"), CHAT),
    "content-length too long": (once(JSON + b"content-length: 100\r\n\r\n{}"), CHAT),
    "content-length cuts the JSON": (once(JSON + b'content-length: 5\r\n\r\n{"id": "c"}'), CHAT),
    "endless answer": (repeated(JSON + b"\r\n{", b" " * 65536, 60 << 20), CHAT),
    "not JSON": (once(JSON + b"content-length: 6\r\n\r\n<html>"), CHAT),
    "a JSON list": (once(JSON + b"content-length: 4\r\n\r\n[{}]"), CHAT),
    "deep JSON": (once(JSON + b"\r\n" + b"[" * 200_000), CHAT),
    "not UTF-8 in a field name": (once(JSON + b'\r\n{"\xff\xfe": 1}'), CHAT),
    "choices of a wrong type": (
        once(UNTIL_CLOSE, b'data: {"choices": {"token_ids": [1]}, "usage": {"prompt_tokens": 1}}\n\n', DONE),
        STREAM,
    ),
    "deep JSON in an event": (
        once(UNTIL_CLOSE, b'data: {"kv_transfer_params": {"a": ' + b"[" * 100_000 + b"}}\n\n", DONE),
        STREAM,
    ),
}
STOKER_CASES: dict[str, tuple[Pieces, bytes]] = {
    "comment lines": (repeated(UNTIL_CLOSE, b": comment\n\n" * 4096, 100 << 20), STREAM),
    "notes": (repeated(UNTIL_CLOSE, NOTES * 2048 + b"\n", 100 << 20), STREAM),
    "number of 5000 digits": (once(UNTIL_CLOSE, b":u %b 3 1 1\n:t 0 5\n" % (b"9" * 5000) + chunk("a")), STREAM),
    "status of 5000 digits": (once(UNTIL_CLOSE, b":x %b died\n" % (b"9" * 5000) + chunk("a")), STREAM),
}


@pytest.mark.parametrize(
    ("name", "dialect"),
    [(name, dialect) for name in CASES for dialect in ("openai", "stoker")]
    + [(name, "stoker") for name in STOKER_CASES],
)
def test_a_worker_that_breaks_the_protocol_costs_one_clean_error(name: str, dialect: str) -> None:
    pieces, body = CASES.get(name) or STOKER_CASES[name]
    if dialect == "stoker" and name in ("choices of a wrong type", "deep JSON in an event"):
        pytest.skip("the gateway does not read the events of a Stoker worker")
    tracemalloc.start()
    try:
        began_s = time.monotonic()
        got, world = asyncio.run(ask(pieces, body, dialect))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    error_of(got)
    assert sum(world.metrics.upstream.values()) == 1, "the worker counts as failed, once"
    assert peak_bytes < 24 << 20
    assert time.monotonic() - began_s < 20.0


@pytest.mark.parametrize("dialect", ["openai", "stoker"])
@pytest.mark.parametrize("sent", [b"", chunk("a"), b"data: {"], ids=["head", "event", "half"])
def test_a_stream_that_stops_sending_ends_with_an_error(dialect: str, sent: bytes) -> None:
    quick = replace(SMALL, first_byte_s=0.3, idle_s=0.1)
    got, world = asyncio.run(ask(once(UNTIL_CLOSE, sent), STREAM, dialect, stays_open=True, proxy=quick))
    error_of(got)
    assert world.metrics.upstream == {("w", "timeout"): 1}


def test_a_worker_may_queue_for_longer_than_it_may_pause() -> None:
    def pieces() -> Iterator[bytes]:
        yield UNTIL_CLOSE
        time.sleep(0.5)  # the gateway's event loop stops too, and its limits do not count that time
        yield chunk("a") + DONE

    got, _ = asyncio.run(ask(pieces, STREAM, "openai", proxy=replace(SMALL, idle_s=0.01)))
    assert got.body == chunk("a") + DONE


def test_a_reader_that_pauses_a_response_does_not_make_it_late() -> None:
    """A slow client is not the worker's fault."""

    async def main() -> None:
        pieces = repeated(UNTIL_CLOSE, chunk("x" * 60_000), 8 << 20)
        quick = replace(SMALL, idle_s=1.0)  # a busy machine makes shorter pauses by itself
        async with raw_worker(lambda: iter([*pieces(), DONE])) as url, World(proxy=quick) as world:
            spec = WorkerSpec(worker_id=WorkerId("w"), url=url, dialect="openai", models=("m",))
            world.fleet.add(spec, world.clock.now())
            answer = await world.send(STREAM)
            answer.pause()
            await asyncio.sleep(2.0)
            answer.resume()
            body = await answer.read(16 << 20)
            assert body.endswith(DONE)

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(20))
def test_random_damage_never_gives_more_than_one_error(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    good = bytearray(CHUNKED + b"".join(chunked(chunk(text)) for text in "abcdef") + chunked(DONE) + b"0\r\n\r\n")
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(good))
        match rng.randrange(3):
            case 0:
                good[at] = rng.randrange(256)
            case 1:
                del good[at : at + rng.randrange(1, 30)]
            case 2:
                good[at:at] = rng.randbytes(rng.randrange(1, 30))
    dialect = rng.choice(["openai", "stoker"])
    cut = sorted(rng.randrange(len(good) + 1) for _ in range(5))
    pieces = [bytes(good[a:b]) for a, b in zip([0, *cut], [*cut, len(good)], strict=True)]
    got, world = asyncio.run(ask(once(*pieces), STREAM, dialect))
    assert sum(world.metrics.upstream.values()) <= 1
    assert got.status in (200, 400, 500, 502, 503, 504)
    if got.status == 200 and not got.body.rstrip().endswith(b"[DONE]"):
        assert got.body.count(b'"error"') <= 1


# ---- buffering


def test_an_event_that_arrives_in_single_bytes_takes_linear_time() -> None:
    """With quadratic buffering, these 4 million bytes took minutes."""
    cutter = EventCutter()
    began_s = time.process_time()
    for _ in range(200_000):
        assert cutter.cut(b"x") == b""
    for _ in range(1000):
        assert cutter.cut(b"y" * 4000) == b""
    assert len(cutter.cut(b"\n\nz")) == 200_000 + 4_000_000 + 2
    assert cutter.rest == b"z"
    assert time.process_time() - began_s < 10.0


@pytest.mark.parametrize("seed", range(5))
def test_the_cutter_gives_the_same_events_for_every_split(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    data = b"".join(rng.choice([b"a", b"\n", b"\r\n", b"\r", b"data: b\n\n", b"\r\n\r\n"]) for _ in range(300))
    for size in (1, 2, 3, 7, 50):
        cutter = EventCutter()
        out = [cutter.cut(data[at : at + size]) for at in range(0, len(data), size)]
        assert b"".join(out) + cutter.rest == data
        assert all(not piece or piece.endswith((b"\n\n", b"\r\n\r\n")) for piece in out)
        assert b"\n\n" not in cutter.rest
        assert b"\r\n\r\n" not in cutter.rest


def test_a_large_event_is_refused_whatever_its_pieces() -> None:
    for size in (1, 1000, 5000):
        answer = ForeignAnswer(max_event_bytes=4096)
        for _ in range(4096 // size):
            answer.push(b"x" * size)
        with pytest.raises(BadAnswer, match="4096"):
            answer.push(b"x" * size)

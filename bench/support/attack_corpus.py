"""The attacks of the `attacks` benchmark, as data: what each connection sends, and how many connections there are.

A script is a generator that one connection runs: it yields bytes to send, and pauses in seconds. When it ends, the
connection is closed and a new one begins. Standard library only.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat

from bench.support.mock_worker import FLOOD_MARKER, KILL_MARKER, MODEL

_PIECE = 64 << 10  # bytes of one send
_FOREVER_S = 3600.0

Script = Iterator[bytes | float]


@dataclass(frozen=True)
class Attack:
    """One way to disturb a gateway. `script(rng, key)` makes what one connection sends; `key` is empty without a key."""

    name: str
    script: Callable[[random.Random, str], Script]
    connections: int
    key: str = ""  # which API key is sent: none, `rival` (no limits) or `limited` (60 requests per minute)
    reads: bool = True  # False: never read an answer
    connects_per_s: float = 500.0  # how fast connections are opened and replaced
    addresses: int = 1  # how many client addresses the connections come from
    bytes_per_s: float | None = None  # below the rate of the benchmark, where a client could not send so much
    resets: bool = False  # close with a TCP reset
    min_s: float = 0.0  # what it needs at 8 MB/s to fill memory; not kept by the short form

    @property
    def is_keyless(self) -> bool:
        return not self.key


def _head(path: str, key: str = "", *headers: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *headers]
    lines += ["Content-Type: application/json"] if method == "POST" else []
    lines += [f"Authorization: Bearer {key}"] if key else []
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _post(path: str, key: str, body: bytes, *headers: str) -> bytes:
    return _head(path, key, f"Content-Length: {len(body)}", *headers) + body


def _chat(text: str, **fields: object) -> bytes:
    message = {"role": "user", "content": text}
    return json.dumps({"model": MODEL, "messages": [message], "max_tokens": 16, **fields}).encode()


def _filled(path: str, key: str, begin: bytes, size: int) -> Script:
    """Send a request whose body is `begin` and then one repeated byte, the last of `begin`."""
    yield _head(path, key, f"Content-Length: {size}") + begin
    piece = begin[-1:] * _PIECE
    for left in range(size - len(begin), 0, -_PIECE):
        yield piece[:left]


CHAT = "/v1/chat/completions"


# ---- without a key


def one_byte_chunks(rng: random.Random, key: str) -> Script:
    yield _head(CHAT, key, "Transfer-Encoding: chunked")
    yield from repeat(b"1\r\nx\r\n" * (_PIECE // 6))


def large_bodies(rng: random.Random, key: str) -> Script:
    return _filled(CHAT, key, b'{"model":"mock","messages":[{"role":"user","content":"x', 60 << 20)


def medium_bodies(rng: random.Random, key: str) -> Script:
    return _filled(CHAT, key, b'{"model":"mock","messages":[{"role":"user","content":"x', 20 << 20)


def slow_heads(rng: random.Random, key: str) -> Script:
    yield f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode()
    while True:
        yield 0.5 + rng.random()
        yield b"x-%d: y\r\n" % rng.randrange(1000)


def slow_bodies(rng: random.Random, key: str) -> Script:
    yield _head(CHAT, key, "Content-Length: 1000000") + b"{"
    while True:
        yield 0.5 + rng.random()
        yield b" "


def connection_churn(rng: random.Random, key: str) -> Script:
    yield b"GET /health HTTP/1.1\r\n"[: rng.randrange(1, 23)]


def pipelined_requests(rng: random.Random, key: str) -> Script:
    yield from repeat(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n" * (_PIECE // 28))


def huge_heads(rng: random.Random, key: str) -> Script:
    lines = b"".join(b"x-header-%03d: %b\r\n" % (number, b"v" * 280) for number in range(100))
    yield from repeat(f"GET /v1/models HTTP/1.1\r\nHost: a\r\n{lines.decode()}\r\n".encode())


def endless_head(rng: random.Random, key: str) -> Script:
    yield b"GET /v1/models HTTP/1.1\r\nHost: a\r\nx-endless: "
    yield from repeat(b"v" * _PIECE)


def keyless_chats(rng: random.Random, key: str) -> Script:
    yield from repeat(_post(CHAT, key, _chat("word " * 400)))


def wrong_keys(rng: random.Random, key: str) -> Script:
    while True:
        yield _post(CHAT, f"sk-{rng.randbytes(16).hex()}", _chat("word " * 400))


def unknown_paths(rng: random.Random, key: str) -> Script:
    yield from repeat(_post("/v2/nothing/here", key, b"x" * _PIECE))


def garbage(rng: random.Random, key: str) -> Script:
    yield rng.randbytes(rng.randrange(100, _PIECE))
    yield 0.2


def tls_hello(rng: random.Random, key: str) -> Script:
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(506)
    yield 0.2


def silent_connection(rng: random.Random, key: str) -> Script:
    yield _FOREVER_S


def huge_user(rng: random.Random, key: str) -> Script:
    return _filled(CHAT, key, b'{"model":"mock","messages":[{"role":"user","content":"hi"}],"user":"x', 30 << 20)


def deep_nesting(rng: random.Random, key: str) -> Script:
    return _filled(CHAT, key, b'{"model":"mock","messages":[', 4 << 20)


def metrics_flood(rng: random.Random, key: str) -> Script:
    yield from repeat(_head("/metrics", key, method="GET") * 20)


def models_flood(rng: random.Random, key: str) -> Script:
    yield from repeat(_head("/v1/models", key, method="GET") * 20)


# ---- with the valid key of another tenant


def long_bodies(rng: random.Random, key: str) -> Script:
    while True:
        yield _post(CHAT, key, _chat(f"{rng.random()} " + "word " * 100_000))


def client_deadlines(rng: random.Random, key: str) -> Script:
    while True:
        yield _post(CHAT, key, _chat(f"{rng.random()}", timeout_s=1e-6))
        yield 0.1


def request_of_death(rng: random.Random, key: str) -> Script:
    while True:
        yield _post(CHAT, key, _chat(f"{rng.random()} {KILL_MARKER}"))
        yield 0.1


def slow_readers(rng: random.Random, key: str) -> Script:
    yield _post(CHAT, key, _chat(FLOOD_MARKER, stream=True))
    yield _FOREVER_S


def usage_flood(rng: random.Random, key: str) -> Script:
    yield from repeat(_head("/v1/usage?start=0&group_by=session,worker,hour", key, method="GET"))


def tokenize_flood(rng: random.Random, key: str) -> Script:
    while True:
        body = json.dumps({"model": MODEL, "prompt": f"{rng.random()} " + "word " * 20_000}).encode()
        yield _post("/tokenize", key, body)


def many_sessions(rng: random.Random, key: str) -> Script:
    while True:
        yield _post(CHAT, key, _chat("hello"), f"x-session-id: {rng.randbytes(32).hex()}")
        yield 0.02


ATTACKS = {
    attack.name: attack
    for attack in (
        Attack("one-byte chunks, 1 connection", one_byte_chunks, 1),
        Attack("one-byte chunks, 50 connections", one_byte_chunks, 50),
        Attack("60 MiB bodies, 40 connections", large_bodies, 40, min_s=60.0),
        Attack("20 MiB bodies, 40 connections", medium_bodies, 40, min_s=60.0),
        Attack("slow heads, 2,000 connections", slow_heads, 2000, addresses=20),
        Attack("slow bodies, 2,000 connections", slow_bodies, 2000, addresses=20),
        Attack("connection churn", connection_churn, 50, connects_per_s=1000.0, resets=True),
        Attack("pipelined tiny requests", pipelined_requests, 10),
        Attack("heads of 30 KB", huge_heads, 20),
        Attack("endless heads", endless_head, 20),
        Attack("chats without a key", keyless_chats, 20),
        Attack("chats with wrong keys", wrong_keys, 20),
        Attack("unknown paths with bodies", unknown_paths, 20),
        Attack("random bytes", garbage, 50),
        Attack("TLS hello to the plain port", tls_hello, 50),
        Attack("silent connections, 1 address", silent_connection, 12_000, connects_per_s=4000.0),
        Attack("silent connections, 50 addresses", silent_connection, 12_000, connects_per_s=4000.0, addresses=50),
        Attack("user field of 30 MB, no key", huge_user, 8, min_s=40.0),
        Attack("nesting of 4 million, no key", deep_nesting, 4),
        Attack("/metrics flood", metrics_flood, 10),
        Attack("/v1/models flood", models_flood, 10),
        Attack("500 KB bodies above the rate limit", long_bodies, 10, "limited"),
        Attack("timeout_s of 1e-6", client_deadlines, 1, "rival"),
        Attack("request of death", request_of_death, 1, "rival"),
        Attack("slow readers, 200 connections", slow_readers, 200, "rival", reads=False),
        Attack("/v1/usage flood", usage_flood, 10, "rival"),
        Attack("/tokenize flood", tokenize_flood, 10, "rival"),
        Attack("new session per request", many_sessions, 10, "rival"),
        Attack("user field of 30 MB, valid key", huge_user, 4, "rival", min_s=30.0),
        Attack("nesting of 4 million, valid key", deep_nesting, 4, "rival"),
    )
}

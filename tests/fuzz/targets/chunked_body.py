"""The chunked transfer coding. Any split of the bytes gives the same payload, end and rest."""

from __future__ import annotations

import random

from stoker.gateway.http import BadMessage
from stoker.gateway.http.chunked import ChunkedReader
from tests.fuzz.target import FuzzTarget, pieces


def _decode(parts: list[bytes]) -> tuple[bytes, bytes | None] | None:
    """Return the payload and the bytes behind its end, or None if the coding is broken."""
    reader, payload, rest = ChunkedReader(), b"", b""
    try:
        for part in parts:
            if reader.done:
                rest += part
            else:
                payload += reader.feed(part)
    except BadMessage:
        return None
    return payload, reader.rest + rest if reader.done else None


def execute(data: bytes, rng: random.Random) -> None:
    whole = _decode([data])
    split = _decode(pieces(data, rng))
    assert split == whole, (split, whole)
    assert whole is None or len(whole[0]) <= len(data)


def seeds() -> list[bytes]:
    return [
        b"5\r\nhello\r\n0\r\n\r\n",
        b"3;name=value\r\nabc\r\n00A\r\n0123456789\r\n0\r\ntrailer: x\r\n\r\nGET / HTTP/1.1\r\n",
        b"1\r\na\r\n" * 50 + b"0\r\n\r\n",
    ]


TARGET = FuzzTarget(
    execute,
    seeds,
    max_input_bytes=8 << 10,
    tokens=[b"\r\n", b"\n", b"0\r\n", b";", b"f" * 15, b"f" * 16, b"0\r\n\r\n", b"1\r\na\r\n", b"a: b\r\n", b"\r"],
)

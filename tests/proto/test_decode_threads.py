"""Request bodies are decoded on several threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from stoker.proto.openai import decode


class FirstKind(msgspec.Struct):
    number: int


class SecondKind(msgspec.Struct):
    first: FirstKind


def test_decoders_are_made_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that make decoders of related Structs at the same time crash the process in msgspec."""
    together = threading.Barrier(2)
    met = []
    make = msgspec.json.Decoder

    def slow(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[object]:
        try:
            together.wait(0.2)
            met.append(kind)
        except threading.BrokenBarrierError:
            pass
        return make(kind)

    monkeypatch.setattr(msgspec.json, "Decoder", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(decode.decode, FirstKind, b'{"number": 1}')
        second = pool.submit(decode.decode, SecondKind, b'{"first": {"number": 2}}')
        assert (first.result(60).number, second.result(60).first.number) == (1, 2)
    assert met == []

"""Streams of foreign workers through the rewriter. Any split gives the same events; internal fields never leave."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import Any

import msgspec

from stoker.base.errors import StokerError
from stoker.gateway.path.rewrite import ForeignAnswer, read_last_usage
from tests.fuzz.target import FuzzTarget, pieces


def _pushed(parts: list[bytes], options: dict[str, bool]) -> bytes | None:
    answer = ForeignAnswer(**options)
    answer.prefill_cached_tokens = 3
    try:
        return b"".join([*(answer.push(part) for part in parts), answer.finish()])
    except (StokerError, ValueError):  # the stream is refused as a whole
        return None


def _events(stream: bytes) -> list[Any]:
    """Return the stream's lines, with JSON data decoded: white space inside it, and empty lines, may differ."""
    lines: list[Any] = []
    for line in stream.split(b"\n"):
        if line in (b"", b"\r"):
            continue
        try:
            lines.append(msgspec.json.decode(line.removeprefix(b"data:")) if line.startswith(b"data:") else line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            lines.append(line)
    return lines


def execute(data: bytes, rng: random.Random) -> None:
    options = {name: rng.random() < 0.5 for name in ("hide_usage", "hide_running", "keep_token_ids", "is_pair")}
    whole = _pushed([data], options)
    split = _pushed(pieces(data, rng), options)
    assert (whole is None) == (split is None)
    if whole is not None and split is not None:
        assert _events(split) == _events(whole), (split, whole)
        assert len(whole) <= len(data) + 100 * (1 + data.count(b"usage"))
    read_last_usage(data)
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # `Legs.parsed` reports these as invalid
        ForeignAnswer(**options).whole(data)


def seeds() -> list[bytes]:
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 9}}
    events = [
        {
            "id": "a",
            "choices": [{"index": 0, "delta": {"content": "hi"}, "token_ids": [1, 2]}],
            "prompt_token_ids": [1],
        },
        {"id": "a", "choices": [], "usage": usage, "kv_transfer_params": {"x": 1}},
    ]
    stream = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"
    response = {"type": "response.completed", "response": {"usage": {"input_tokens": 4}, "kv_transfer_params": {}}}
    last = b"event: response.completed\ndata: %b\n\n" % json.dumps(response).encode()
    return [stream, stream.replace(b"\n", b"\r\n"), b": comment\n\n" + last, json.dumps(events[1]).encode()]


TARGET = FuzzTarget(
    execute,
    seeds,
    errors=(StokerError,),
    max_input_bytes=8 << 10,
    tokens=[
        b"\n\n", b"\r\n\r\n", b"\n", b"\r", b"data: ", b"data:", b"event: response.completed\n", b'"usage":{', b"[DONE]", b":",
        b'"token_ids":[', b'"choices":[]', b'"choices":{}', b'"response":{', b'"kv_transfer_params":', b"\xff",
        b'"cached_tokens":-1',
    ],
)  # fmt: skip

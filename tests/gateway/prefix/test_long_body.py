"""Long bodies are decoded in pieces, with the same result as in one call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stoker.base.errors import InvalidRequest
from stoker.gateway.prefix.long_body import MAX_EXACT_BYTES, decode_body
from stoker.proto.openai.chat import ChatRequest, Message
from stoker.proto.openai.decode import decode
from stoker.proto.openai.tools import Tool

LISTS = {"messages": Message, "tools": Tool}
TEXT = "many words " * 100
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": TEXT}] * 200},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}] * 200}], "temperature": 0.5},
        {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL] * 1000, "model": "m"},
        {"prompt_token_ids": [7] * 100_000},
        {"messages": [{"role": "user", "content": "hi"}], "tools": None, "user": "x" * 100_000},
    ],
)
def test_it_is_the_same_as_in_one_call(body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    assert len(raw) > 1 << 16
    assert decode_body(ChatRequest, raw, LISTS) == decode(ChatRequest, raw)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": TEXT}] * 200 + [{"role": 7}]},
        {"messages": "x" * 100_000},
        {"messages": [{"role": "user", "content": TEXT}] * 200, "n": "two"},
        {"messages": [{"role": "user", "content": "x" * MAX_EXACT_BYTES}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 60_000}]},
    ],
)
def test_what_is_invalid_or_too_large_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        decode_body(ChatRequest, json.dumps(body).encode(), LISTS)

"""The parts of a prompt: a moved cache mark and a volatile line change nothing, and no body takes long."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from stoker.gateway.api.client_body import EndpointKind, parse
from stoker.gateway.prefix.prompt_parts import PromptParts, prompt_parts
from stoker.gateway.prefix.stable_json import StableJson

CHAT, MESSAGES, RESPONSES = EndpointKind.CHAT, EndpointKind.MESSAGES, EndpointKind.RESPONSES


def parts_of(kind: EndpointKind, **body: Any) -> PromptParts | None:
    return prompt_parts(parse(kind, json.dumps(body).encode()), StableJson())


@pytest.mark.parametrize("mark", [{"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}, None])
def test_a_cache_mark_is_not_a_part(mark: Any) -> None:
    plain = {"type": "text", "text": 'say "cache_control": {}'}
    marked = plain | {"cache_control": mark}
    expected = parts_of(MESSAGES, messages=[{"role": "user", "content": [plain]}], system=[plain])
    assert parts_of(MESSAGES, messages=[{"role": "user", "content": [marked]}], system=[marked]) == expected


def test_a_volatile_line_is_not_a_part() -> None:
    def sent(number: int) -> PromptParts | None:
        line = {"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}
        system = [line, {"type": "text", "text": "You are an agent."}]
        return parts_of(MESSAGES, messages=[{"role": "user", "content": "Hi"}], system=system)

    assert sent(1) == sent(2)


@pytest.mark.parametrize(
    ("kind", "body", "names"),
    [
        (CHAT, {"messages": [{"role": "system"}, {"role": "user"}]}, ["message 0", "message 1"]),
        (MESSAGES, {"messages": [{"role": "user"}], "system": "S"}, ["system", "message 0"]),
        (RESPONSES, {"input": [{"role": "user"}], "instructions": "S"}, ["system", "message 0"]),
        (RESPONSES, {"input": [{"role": "user"}]}, ["system", "message 0"]),
    ],
)
def test_messages_are_named_as_the_client_counts_them(
    kind: EndpointKind, body: dict[str, Any], names: list[str]
) -> None:
    parts = parts_of(kind, **body)
    assert parts is not None
    assert [parts.name(i) for i in range(len(parts.messages))] == names


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": " " * 3_000_000}],
        [{"role": "user", "content": [{"type": "text", "text": '"cache_control":{' * 100_000}]}],
        [{"role": "user", "content": ","}] * 100_000,
        [0] * 1_000_000,
        "x" * 3_000_000,
        {"a": 1},
        None,
    ],
    ids=["spaces", "marks", "many messages", "many numbers", "text", "object", "null"],
)
def test_no_body_takes_long(messages: Any) -> None:
    envelope = parse(MESSAGES, json.dumps({"messages": messages}).encode())
    began_s = time.perf_counter()
    prompt_parts(envelope, StableJson())
    assert time.perf_counter() - began_s < 0.5

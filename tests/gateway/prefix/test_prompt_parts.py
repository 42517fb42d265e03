"""The parts of a prompt: a moved cache mark and a volatile line change nothing, and no body takes long."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import msgspec
import pytest

from stoker.base.errors import InvalidRequest
from stoker.gateway.api.client_body import EndpointKind, parse
from stoker.gateway.prefix.prompt_parts import PromptParts, prompt_parts
from stoker.gateway.prefix.stable_json import StableJson

CHAT, MESSAGES, RESPONSES = EndpointKind.CHAT, EndpointKind.MESSAGES, EndpointKind.RESPONSES


def parts_of(kind: EndpointKind, **body: Any) -> PromptParts | None:
    return prompt_parts(parse(kind, json.dumps(body).encode()), StableJson())


def shown(parts: PromptParts | None) -> tuple[list[int], list[int], bool]:
    assert parts is not None
    return list(parts.tools), list(parts.messages), parts.has_system


@pytest.mark.parametrize("mark", [{"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}, None])
def test_a_cache_mark_is_not_a_part(mark: Any) -> None:
    plain = {"type": "text", "text": 'say "cache_control": {}'}
    marked = plain | {"cache_control": mark}
    expected = parts_of(MESSAGES, messages=[{"role": "user", "content": [plain]}], system=[plain])
    found = parts_of(MESSAGES, messages=[{"role": "user", "content": [marked]}], system=[marked])
    assert shown(found) == shown(expected)


def test_a_volatile_line_is_not_a_part() -> None:
    def sent(number: int) -> PromptParts | None:
        line = {"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}
        system = [line, {"type": "text", "text": "You are an agent."}]
        return parts_of(MESSAGES, messages=[{"role": "user", "content": "Hi"}], system=system)

    assert shown(sent(1)) == shown(sent(2))


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


def random_list(rng: random.Random) -> str:
    """A JSON list in which one item may be the beginning of another one."""
    items = ["1", "12", '"a"', '"a,b"', '{"role":"user","cache_control":null}', "[1,[2]]", "{}", "null"]
    separator, end = rng.choice([",", ", ", " ,"]), rng.choice(["", "", " "])
    return "[" + separator.join(rng.choices(items, k=rng.randrange(5))) + end + "]"


@pytest.mark.parametrize("seed", range(300))
def test_known_parts_do_not_change_the_result(seed: int) -> None:
    """The earlier turn may be another conversation, another API, or one that this one continues."""
    rng = random.Random(seed)
    kinds = [CHAT, MESSAGES, RESPONSES]
    earlier = kind = rng.choice(kinds)
    old_messages, old_tools = random_list(rng), random_list(rng)
    messages, tools = random_list(rng), random_list(rng)
    if rng.random() < 0.7:
        earlier = rng.choice(kinds)
    if rng.random() < 0.7:
        messages = old_messages[:-1] + rng.choice([",", "", "2,", ", "]) + messages[1:]
        tools = rng.choice([tools, old_tools])

    def sent(kind: EndpointKind, messages: str, tools: str, known: PromptParts | None = None) -> PromptParts | None:
        name = "input" if kind is RESPONSES else "messages"
        body = f'{{"{name}": {messages}, "tools": {tools}, "system": "S"}}'
        try:
            envelope = parse(kind, body.encode())
        except InvalidRequest:  # not JSON: the two lists were joined wrongly
            return None
        return prompt_parts(envelope, StableJson(), known)

    known = sent(earlier, old_messages, old_tools)
    assert known is not None
    assert sent(kind, messages, tools, known) == sent(kind, messages, tools)


def test_a_conversation_that_grows_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [{"role": "user", "content": f"turn {number}"} for number in range(9)]
    tools = [{"type": "function"}]
    first = parts_of(CHAT, messages=turns[:7], tools=tools)
    parsed: list[int] = []

    class Counting:
        def decode(self, field: bytes | memoryview) -> list[msgspec.Raw]:
            items = msgspec.json.decode(field, type=list[msgspec.Raw])
            parsed.append(len(items))
            return items

    monkeypatch.setattr("stoker.gateway.prefix.prompt_parts._ITEMS", Counting())
    envelope = parse(CHAT, json.dumps({"messages": turns, "tools": tools}).encode())
    found = prompt_parts(envelope, StableJson(), first)
    assert parsed == [2]
    assert found == prompt_parts(envelope, StableJson())

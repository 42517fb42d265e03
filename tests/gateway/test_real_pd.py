"""Real prefill and decode workers behind the gateway give the answers of one unified worker, for every kind of request.

Every prompt is handed off, even the shortest. After each test nothing is leased, reserved or running anywhere.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from real_fleet import ADMIN_TOKEN, Exchange, Process, RealFleet, real_fleet
from worker.real import CHAT, COMPLETIONS, RESPONSES, wait_for

BLOCK = 16
COMPUTED, PULLED = "stoker_computed_tokens_total", "stoker_kv_pulled_tokens_total"
LATE = "stoker_kv_failed_loads_total"  # on a stalling machine, the tiny model computes faster than the KV arrives
# Engine steps in flight when a stop string or a disconnect is noticed.
AHEAD_TOKENS = 4

WORDS = "river stone lamp garden signal copper winter orbit pepper violin"
ARGUMENTS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "parameters": ARGUMENTS}
TOOLS = [{"type": "function", "function": WEATHER}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": ARGUMENTS}}
USER: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me"}], "stream_options": {"include_usage": True}}
TURNS = [
    {"role": "system", "content": "You are a careful agent. " + WORDS * 20},
    {"role": "user", "content": f"First: {WORDS}"},
    {"role": "assistant", "content": WORDS},
    {"role": "user", "content": "And then?"},
]
CALLED = [
    {"role": "user", "content": "What is the weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "x"}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]
GREEDY = {"temperature": 0, "ignore_eos": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sampled": (CHAT, USER | {"max_tokens": 24, "ignore_eos": True}),
    "greedy": (CHAT, USER | {"max_tokens": 24} | GREEDY),
    "penalties": (CHAT, USER | {"max_tokens": 24, "frequency_penalty": 1.0, "repetition_penalty": 1.3}),
    "logprobs": (CHAT, USER | {"max_tokens": 12, "logprobs": True, "top_logprobs": 2, "ignore_eos": True}),
    "forced": (CHAT, USER | {"max_tokens": 60, "tools": TOOLS, "tool_choice": "required"}),
    "schema": (CHAT, USER | {"max_tokens": 50, "response_format": SCHEMA, "temperature": 1.5}),
    "echo": (COMPLETIONS, {"prompt": "Once upon a time", "echo": True, "max_tokens": 16, "ignore_eos": True}),
    # A worker alone stores no responses.
    "responses": (RESPONSES, {"input": "Tell me", "max_output_tokens": 16, "ignore_eos": True, "store": False}),
    "multi-turn": (CHAT, {"messages": TURNS, "max_tokens": 20} | GREEDY),
    "called": (CHAT, {"messages": CALLED, "tools": TOOLS, "max_tokens": 20} | GREEDY),
    "two": (CHAT, USER | {"n": 2, "max_tokens": 16, "temperature": 1.2, "ignore_eos": True}),
    "two-schema": (CHAT, USER | {"n": 2, "max_tokens": 40, "response_format": SCHEMA, "temperature": 1.5}),
    "stop": (
        COMPLETIONS,
        {"prompt": WORDS * 3, "max_tokens": 60, "stop": ["st", "ar", "in"], "temperature": 1.5, "seed": 2},
    ),
    "stop-at-once": (CHAT, USER | {"max_tokens": 60, "stop": [*"aeiou", " "], "n": 2}),
    "one-token": (CHAT, USER | {"max_tokens": 1}),
    "two-tokens": (CHAT, USER | {"max_tokens": 2, "ignore_eos": True}),
    "prompts": (
        COMPLETIONS,
        {"prompt": [WORDS * 4, "x", [7] * 2 * BLOCK], "n": 2, "max_tokens": 6, "logprobs": 1, "ignore_eos": True},
    ),
    "responses-tools": (
        RESPONSES,
        {
            "input": "Tell me",
            "max_output_tokens": 60,
            "tools": [{"type": "function"} | WEATHER],
            "tool_choice": "required",
            "store": False,
        },
    ),
    "user-salt": (CHAT, USER | {"max_tokens": 8, "cache_salt": "mine", "ignore_eos": True}),
}


@pytest.fixture(
    scope="module", params=[pytest.param(1, id="1P+1D"), pytest.param(2, id="2P+2D", marks=pytest.mark.slow)]
)
def fleet(request: Any, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    roles = ("prefill",) * request.param + ("decode",) * request.param
    work = tmp_path_factory.mktemp("fleet")
    # No lease expires during a test.
    with real_fleet(tiny_folder, work, roles=roles, lease_s=600.0) as fleet:
        yield fleet
    assert not [path.name for path in work.glob("*.log") if "Traceback" in path.read_text()]


@pytest.fixture(autouse=True)
def nothing_left(fleet: RealFleet) -> Iterator[None]:
    yield
    wait_for(lambda: not any(fleet.in_flight()["reserved"].values()))
    # Every pull has been acknowledged.
    wait_for(lambda: all(worker.is_idle for worker in fleet.workers))


def both(fleet: RealFleet, path: str, body: dict[str, Any]) -> tuple[Exchange, Exchange]:
    """Send the same request to the gateway and to the reference, and compare the complete answers."""
    assert fleet.reference is not None
    named = {"X-Request-Id": "r-1"}
    asked = {"model": "tiny", "seed": 11} | body
    through = Exchange(fleet.gateway.port, asked, named, path)
    alone = Exchange(fleet.reference.port, asked, named, path)
    for exchange in (through, alone):
        exchange.wait(120)
        exchange.check()
    return through, alone


def shown(exchange: Exchange) -> list[bytes]:
    """Equal except for times, cached tokens, and random ids."""
    found = exchange.answer.split(b"\n\n") if exchange.body.get("stream") else [exchange.answer]
    masked = [re.sub(rb'"(created|created_at)":\d+', b"", one) for one in found]
    masked = [re.sub(rb'"(id|item_id|call_id)":"[^"]*"', b"", one) for one in masked]
    names = set(re.findall(rb'\{"id":"((?:chatcmpl|cmpl)-[^"]*)"', exchange.answer))
    assert len(names) < 2, "two workers, two answers"
    # A prompt's kernel and a single token's may differ in a log-probability's last digits.
    masked = [re.sub(rb"-?\d+\.\d{9,}", lambda digits: b"%.9f" % float(digits[0]), one) for one in masked]
    masked = [re.sub(rb'"cached_tokens":\d+', b"", one) for one in masked]
    return sorted(masked, key=lambda one: re.findall(rb'"choices":\[\{"index":(\d)', one))  # their order may differ


def handoffs(fleet: RealFleet, outcome: str = "done") -> float:
    return fleet.gateway.metrics().get(f'stoker_gateway_handoffs_total{{outcome="{outcome}"}}', 0)


def total(workers: list[Process], name: str) -> float:
    return sum(worker.metrics()[name] for worker in workers)


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("name", CASES)
def test_a_pair_gives_the_same_answer_as_one_worker(fleet: RealFleet, name: str, streams: bool) -> None:
    path, body = CASES[name]
    body = dict(body, stream=streams)
    if not streams:
        body.pop("stream_options", None)
    decode = fleet.of_role("decode")
    computed, late, handed_off = total(decode, COMPUTED), total(decode, LATE), handoffs(fleet)
    through, alone = both(fleet, path, body)
    assert shown(through) == shown(alone)
    wait_for(lambda: all(worker.is_idle for worker in fleet.workers))
    if name in ("one-token", "stop-at-once"):
        assert total(decode, COMPUTED) == computed, "prefill's token was the whole answer"
        return
    assert handoffs(fleet) == handed_off + 1
    num_choices = len(body["prompt"]) * 2 if name == "prompts" else body.get("n", 1)
    most = num_choices * (body.get("max_tokens") or body["max_output_tokens"])
    if total(decode, LATE) == late:
        assert total(decode, COMPUTED) - computed <= most - num_choices + AHEAD_TOKENS


@pytest.mark.parametrize("num_tokens", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1, 200 * BLOCK + 7])
def test_decode_computes_no_prompt_token(fleet: RealFleet, num_tokens: int) -> None:
    rng = random.Random(num_tokens)
    prompt = [rng.randrange(100, 20_000) for _ in range(num_tokens)]
    decode = fleet.of_role("decode")
    computed, pulled, late = total(decode, COMPUTED), total(decode, PULLED), total(decode, LATE)
    through, alone = both(fleet, COMPLETIONS, {"prompt": prompt, "max_tokens": 6} | GREEDY)
    assert through.json["choices"] == alone.json["choices"]
    assert through.usage == alone.usage | {"prompt_tokens_details": through.usage["prompt_tokens_details"]}
    # An engine reports its counts shortly after its answers.
    wait_for(lambda: total(decode, COMPUTED) > computed and all(worker.is_idle for worker in fleet.workers))
    if total(decode, LATE) == late:
        assert total(decode, COMPUTED) - computed == 5, "one for each token after the first"
        assert total(decode, PULLED) - pulled == num_tokens


def test_cached_tokens_are_reported_once_as_prefill_found_them(fleet: RealFleet) -> None:
    for streams, again in itertools.product((True, False), range(3)):
        messages = [{"role": "user", "content": f"{streams} {WORDS * 8} {again * WORDS}"}]
        options = {"stream_options": {"include_usage": True}} if streams else {}
        body = {"messages": messages, "stream": streams, "max_tokens": 6} | GREEDY | options
        through, alone = both(fleet, CHAT, body)
        found = through.usage["prompt_tokens_details"]["cached_tokens"]
        assert found == alone.usage["prompt_tokens_details"]["cached_tokens"]
        assert (found > 2 * BLOCK) == (again > 0)  # the rest is the chat template
        assert through.answer.count(b'"cached_tokens"') == 1


def test_turns_of_a_conversation_go_on_from_each_other(fleet: RealFleet) -> None:
    messages: list[dict[str, str]] = [{"role": "system", "content": WORDS * 10}]
    for turn in range(4):
        messages.append({"role": "user", "content": f"{turn} {WORDS}"})
        through, alone = both(fleet, CHAT, {"messages": messages, "max_tokens": 12} | GREEDY)
        assert through.json["choices"] == alone.json["choices"]
        messages.append(through.json["choices"][0]["message"])
    assert handoffs(fleet, "failed") == 0


def test_many_at_once_and_clients_that_leave(fleet: RealFleet) -> None:
    """About thirty requests in one burst; a third of the clients disconnect at random moments."""
    assert fleet.reference is not None
    bodies = [
        {
            "messages": [{"role": "user", "content": f"{number} " + WORDS * (1 + 7 * (number % 5))}],
            "max_tokens": 24,
            "seed": number,
            "ignore_eos": True,
            "stream": number % 2 == 0,
            "n": 1 + number % 2,
        }
        for number in range(24)
    ]
    exchanges = [fleet.ask(body) for body in bodies]
    leaving = [fleet.ask(body | {"stream": True, "max_tokens": 2000}) for body in bodies[::3]]
    for number, one in enumerate(leaving):
        wait_for(lambda one=one, number=number: len(one.events) >= number or one.is_over)  # type: ignore[misc]
        one.leave()
    for one, body in zip(exchanges, bodies, strict=True):
        one.wait(120)
        undisturbed = fleet.direct(body)
        undisturbed.wait(120)
        assert one.said[0] == undisturbed.said[0]
    wait_for(lambda: all(worker.is_idle for worker in fleet.workers))


def test_an_error_has_the_shape_of_the_clients_api(fleet: RealFleet) -> None:
    assert fleet.reference is not None
    bad: list[dict[str, Any]] = [
        {"messages": []},
        {"messages": TURNS, "max_tokens": -2},
        {"messages": TURNS, "n": "many"},
    ]
    for body in bad:
        asked = {"model": "tiny"} | body
        through, alone = (Exchange(port, asked) for port in (fleet.gateway.port, fleet.reference.port))
        through.wait()
        alone.wait()
        assert (through.status, through.json) == (alone.status, alone.json)
        assert 400 <= through.status < 500
    refused = fleet.ask({"messages": TURNS, "kv_transfer_params": {"do_remote_decode": True}})
    refused.wait()
    assert "kv_transfer_params" not in json.dumps(refused.json.get("choices", []))


def test_roles_change_while_requests_run(fleet: RealFleet) -> None:
    """Every worker has every role for a while, and no answer changes."""
    prefill, decode = fleet.of_role("prefill")[0], fleet.of_role("decode")[0]
    body = USER | {"max_tokens": 40, "stream": True, "model": "tiny", "seed": 3} | GREEDY
    assert fleet.reference is not None
    expected = Exchange(fleet.reference.port, body)
    asked: list[Exchange] = []
    for worker, role in [
        (prefill, "decode"),
        (decode, "prefill"),
        (prefill, "unified"),
        (decode, "unified"),
        (prefill, "prefill"),
        (decode, "decode"),
    ]:
        asked += [Exchange(fleet.gateway.port, body) for _ in range(2)]
        wait_for(partial(has_begun, asked[-1]))
        set_role(fleet, worker, role)
        assert worker.get("/stoker/worker")["role"] == role
    expected.wait()
    for one in asked:
        one.wait()
        assert one.said == expected.said


def has_begun(exchange: Exchange) -> bool:
    return bool(exchange.events)


def set_role(fleet: RealFleet, worker: Process, role: str) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    url = f"{fleet.gateway.url}/admin/role?worker=127.0.0.1:{worker.port}&role={role}"
    with urllib.request.urlopen(urllib.request.Request(url, b"", headers), timeout=60) as answer:
        assert json.loads(answer.read())["role"] == role

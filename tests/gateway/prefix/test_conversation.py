"""Prefix keys: equal prompts have equal keys, a longer prompt begins with them, and they match the worker's blocks."""

from __future__ import annotations

import asyncio
import json
import random
import types
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_text import make_folder

from stoker.base.errors import InvalidRequest
from stoker.engine.process.block_log import salt_hash as worker_salt_hash
from stoker.gateway.api.client_body import EndpointKind, RequestEnvelope, parse
from stoker.gateway.prefix.conversation_keys import PrefixKeyMakers, TextPrefixKeys
from stoker.gateway.prefix.fair_threads import FairThreads
from stoker.gateway.prefix.prefix_keys import root_key, token_keys
from stoker.gateway.prefix.prefix_memo import PrefixMemo
from stoker.gateway.prefix.token_prefix_keys import TokenPrefixKeys, TokenText
from stoker.kv.blocks.keys import salt_hash
from stoker.proto.messages import EngineInfo
from stoker.proto.openai.chat import ChatRequest
from stoker.proto.openai.decode import decode
from stoker.text.conversation import is_constrained
from stoker.text.folder import text_files
from stoker.text.tokenizer import Tokenizer
from stoker.text.tools import chat_tools
from stoker.worker.app import make_app
from stoker.worker.chat import CHAT
from stoker.worker.completions import COMPLETIONS
from stoker.worker.config import HttpConfig
from stoker.worker.constraint import resolve_constraint
from stoker.worker.context import CONTEXT, ModelText, WorkerContext
from stoker.worker.responses import RESPONSES

BLOCK = 16
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks something up. Größe: 3 «parts»",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


def worker_context(folder: Path) -> WorkerContext:
    text = ModelText.from_folder(folder)
    info = EngineInfo(
        model_fingerprint="f" * 16,
        device="cpu",
        dtype="float32",
        vocab_size=text.tokenizer.vocab_size,
        max_model_tokens=1_000_000,
        block_tokens=BLOCK,
        num_blocks=64,
        max_rows=8,
        load_s=0.0,
    )
    service: Any = types.SimpleNamespace(info=info, ready=True, stats=None, num_restarts=0)
    return make_app(service, text, HttpConfig(served_names=("m",)))[CONTEXT]


async def worker_token_ids(context: WorkerContext, kind: EndpointKind, body: bytes) -> list[int]:
    """The token ids that the engine would get, computed with the worker's own code."""
    endpoint = {EndpointKind.CHAT: CHAT, EndpointKind.COMPLETIONS: COMPLETIONS, EndpointKind.RESPONSES: RESPONSES}[kind]
    return (await endpoint.choices_of(context, body, None, "r"))[0].request.token_ids


def envelope(kind: EndpointKind, body: dict[str, Any]) -> RequestEnvelope:
    return parse(kind, json.dumps(body).encode())


def chat(*contents: str, **fields: Any) -> dict[str, Any]:
    roles = ["system", "user", "assistant"]
    messages = [{"role": roles[min(i, 1) + (i > 1 and i % 2 == 0)], "content": text} for i, text in enumerate(contents)]
    return {"model": "m", "messages": messages, **fields}


CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"query": "x"}'}}
BODIES: list[tuple[EndpointKind, dict[str, Any]]] = [
    (EndpointKind.CHAT, chat("Be brief. " * 40, "Hi there 1234")),
    (EndpointKind.CHAT, chat("s", "u", "a", "u2", tools=TOOLS)),
    (EndpointKind.CHAT, chat("s", "u", tools=TOOLS, tool_choice="required")),
    (EndpointKind.CHAT, chat("s", "u", tools=TOOLS, tool_choice="none")),
    (EndpointKind.CHAT, chat("s", "u", response_format={"type": "json_object"}, reasoning_effort="high")),
    (EndpointKind.CHAT, chat("s", "u", response_format={"type": "text"})),
    (EndpointKind.CHAT, chat("s", "u", "half an ans", continue_final_message=True)),
    (EndpointKind.CHAT, chat("s", "u", add_generation_prompt=False, chat_template_kwargs={"enable_thinking": False})),
    (EndpointKind.CHAT, chat("s", "u", guided_regex="a+", rejectIfBusy=True) | {"rejectIfBusy": True}),
    (EndpointKind.CHAT, {"model": "m", "prompt_token_ids": list(range(100))}),
    (
        EndpointKind.CHAT,
        {
            "model": "m",
            "tools": TOOLS,
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "user", "content": "<|im_end|>\n<|im_start|>system\n🦊" * 20},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "result\n" * 30},
            ],
        },
    ),
    (EndpointKind.COMPLETIONS, {"model": "m", "prompt": "def add(a, b):\n    return" * 20}),
    (EndpointKind.COMPLETIONS, {"model": "m", "prompt": [1, 2, 3] * 20}),
    (EndpointKind.COMPLETIONS, {"model": "m", "prompt": ["first " * 30, "second"]}),
    (EndpointKind.RESPONSES, {"model": "m", "input": "Hi " * 50, "instructions": "Be brief."}),
    (
        EndpointKind.RESPONSES,
        {
            "model": "m",
            "reasoning": {"effort": "none"},
            "tools": [{"type": "function", **TOOLS[0]["function"]}],  # type: ignore[dict-item]
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "look"}]},
                {"type": "reasoning", "id": "x"},
                {"type": "function_call", "call_id": "c", "name": "look_up", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "found " * 40},
            ],
        },
    ),
]


@pytest.mark.parametrize(("kind", "body"), BODIES)
@pytest.mark.parametrize("salt", [None, "tenant"])
def test_token_keys_are_those_of_the_worker_s_prompt(
    folder: Path, kind: EndpointKind, body: dict[str, Any], salt: str | None
) -> None:
    maker = TokenPrefixKeys(TokenText.from_files(text_files(folder)), BLOCK)
    sent = {name: value for name, value in body.items() if name != "rejectIfBusy"}  # the gateway's own

    async def main() -> list[int]:
        return await worker_token_ids(worker_context(folder), kind, json.dumps(sent).encode())

    ids = asyncio.run(main())
    root = root_key(worker_salt_hash(salt) if salt else None)
    found = maker.keys(envelope(kind, body), salt)
    assert found.keys == token_keys(array("I", ids), root, BLOCK)
    assert maker.keys(envelope(kind, body), salt).keys == found.keys
    if kind is not EndpointKind.COMPLETIONS:
        assert found.num_tokens == len(ids)


def test_salts_are_hashed_as_the_worker_does_it() -> None:
    for salt in ("", "a", "täñant", "x" * 500):
        assert salt_hash(salt) == worker_salt_hash(salt)


def test_files_of_a_tokenizer_stay_in_their_folder(folder: Path) -> None:
    from stoker.base.errors import ModelFilesError

    for name in ("../escape.json", "/etc/escape", "a/b.json"):
        with pytest.raises(ModelFilesError):
            TokenText.from_files({**text_files(folder), name: "x"})


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "text"}},
        {"guided_json": {"type": "object"}},
        {"guided_regex": ""},
        {"guided_regex": "a"},
        {"guided_grammar": "root ::= 'a'"},
        {"guided_choice": ["a"]},
        {"structured_outputs": {"regex": "a"}},
        {"structured_outputs": {"json_object": False}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"json": {}}},
        {"structured_outputs": {"choice": ["a"]}},
        {},
    ],
)
def test_keys_of_constrained_requests_need_no_grammar(fields: dict[str, Any]) -> None:
    body = decode(ChatRequest, json.dumps(chat("s", "u", **fields)).encode())
    expected = resolve_constraint(body, body.response_format) is not None
    assert is_constrained(body, body.response_format, chat_tools(body, 10)) == expected


# ---- growing conversations


def lines(rng: random.Random, count: int) -> str:
    words = ["fox", "return", "2026", "<|im_end|>", "<|im_", "start|>", "\n", "\n\n", "🦊", "def", " ", "é", "<think>"]
    return "".join(rng.choice(words) + rng.choice(["", " ", "\n"]) for _ in range(count))


@pytest.mark.parametrize("seed", range(8))
def test_a_text_that_grew_or_changed_has_the_keys_of_all_its_tokens(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    known, fresh = Tokenizer.from_folder(folder), Tokenizer.from_folder(folder)
    memo = PrefixMemo(known, BLOCK, limit_bytes=rng.choice([1 << 30, 20_000]))
    text = ""
    for _ in range(25):
        if rng.random() < 0.25:  # another conversation, or this one truncated anywhere
            text = text[: rng.randrange(len(text) + 1)]
        text += lines(rng, rng.choice([1, 30, 900, 3000]))
        root = root_key(rng.choice([None, "a"]))
        ids = array("I", fresh.encode(text))
        keys, num_tokens = memo.blocks(text, root)
        assert num_tokens == len(ids)
        assert keys == token_keys(ids, root, BLOCK)
    assert memo._used_bytes <= max(20_000, memo._limit_bytes)


def test_only_the_new_tail_is_tokenized(folder: Path) -> None:
    text = TokenText.from_files(text_files(folder))
    maker = TokenPrefixKeys(text, BLOCK)
    rng = random.Random(0)
    turns = [lines(rng, 2000) for _ in range(12)]
    maker.keys(envelope(EndpointKind.CHAT, chat("s", *turns)))
    before = text.tokenizer.encoded_chars
    found = maker.keys(envelope(EndpointKind.CHAT, chat("s", *turns, "one more")))
    assert text.tokenizer.encoded_chars - before < 3000
    assert len(found.keys) > 500


# ---- text keys

BIG = [f"{i}: " + "x" * 700 for i in range(40)]


def test_text_keys_of_a_next_turn_begin_with_those_of_the_last() -> None:
    maker = TextPrefixKeys()
    first = maker.keys(envelope(EndpointKind.CHAT, chat("s", *BIG)))
    second = maker.keys(envelope(EndpointKind.CHAT, chat("s", *BIG, "and now?")))
    assert len(first.keys) > 20
    assert list(second.keys[: len(first.keys) - 1]) == list(first.keys[:-1])
    assert first.num_tokens >= len(first.keys) * first.block_tokens


CHANGES: list[Callable[[dict[str, Any]], dict[str, Any]]] = [
    lambda body: body | {"tools": TOOLS},
    lambda body: body | {"messages": [{"role": "system", "content": "t"}, *body["messages"][1:]]},
]


@pytest.mark.parametrize("change", CHANGES)
def test_another_beginning_is_another_conversation(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    body = chat("s", *BIG)
    keys = TextPrefixKeys().keys(envelope(EndpointKind.CHAT, body)).keys
    other = TextPrefixKeys().keys(envelope(EndpointKind.CHAT, change(body))).keys
    assert not set(keys) & set(other)


def test_tenants_share_no_text_key() -> None:
    body = envelope(EndpointKind.CHAT, chat("s", *BIG))
    keys = [set(TextPrefixKeys().keys(body, salt).keys) for salt in (None, "a", "b")]
    assert not keys[0] & keys[1]
    assert not keys[1] & keys[2]


@pytest.mark.parametrize(
    ("kind", "body"),
    [(EndpointKind.CHAT, {}), (EndpointKind.RESPONSES, {"input": 3}), (EndpointKind.COMPLETIONS, {"prompt": None})],
)
def test_text_keys_never_fail(kind: EndpointKind, body: dict[str, Any]) -> None:
    found = TextPrefixKeys().keys(envelope(kind, body))
    assert list(found.keys) == []
    assert found.num_tokens >= 1


# ---- the maker of each model


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "no list"},
        {"messages": []},
        {"messages": [{"role": "nobody", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "odd"}]},
        {"prompt_token_ids": [1 << 40]},
    ],
)
def test_what_the_worker_will_refuse_is_routed_by_its_text(folder: Path, body: dict[str, Any]) -> None:
    makers = PrefixKeyMakers()
    maker = TokenPrefixKeys(TokenText.from_files(text_files(folder)), BLOCK)
    makers.set_exact("m", maker)
    given = envelope(EndpointKind.CHAT, body)
    with pytest.raises(InvalidRequest):
        maker.keys(given)
    assert asyncio.run(makers.keys("m", given, None)) == TextPrefixKeys().keys(given)
    makers.close()


def test_only_short_bodies_are_tokenized_on_the_event_loop(folder: Path) -> None:
    makers = PrefixKeyMakers()
    makers.set_exact("m", TokenPrefixKeys(TokenText.from_files(text_files(folder)), BLOCK))
    for model, num_chars, is_short in (("m", 7000, True), ("m", 9000, False), ("x", 9000, True), ("x", 1 << 21, False)):
        given = envelope(EndpointKind.CHAT, chat("s", "x" * num_chars))
        assert (makers.keys_now(model, given, None) is not None) == is_short
    makers.close()


def test_long_bodies_are_read_in_a_thread_and_too_many_of_them_as_text(folder: Path) -> None:
    makers = PrefixKeyMakers(inline_bytes=1000, threads=FairThreads(num_threads=1, max_waiting=1))
    maker = TokenPrefixKeys(TokenText.from_files(text_files(folder)), BLOCK)
    makers.set_exact("m", maker)
    given = envelope(EndpointKind.CHAT, chat("s", *BIG))

    async def main() -> None:
        found = await asyncio.gather(*(makers.keys("m", given, None) for _ in range(5)))
        assert [one.block_tokens for one in found] == [BLOCK, BLOCK, 256, 256, 256]
        assert (await makers.keys("m", given, None)).keys == maker.keys(given).keys
        assert (await makers.keys("unknown", given, None)).block_tokens == 256

    asyncio.run(main())
    makers.close()

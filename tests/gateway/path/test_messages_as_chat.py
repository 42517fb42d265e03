"""Messages requests at the gateway: foreign workers get chat and their answers are translated, errors have Anthropic's shape."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Coroutine
from typing import Any

import pytest
from mocks import DONE, answers, chunk, drops, event, in_turn, streams, usage, usage_chunk
from sse_reader import SseReader
from world import Got, World

from stoker.gateway.key_settings import KeySettings

PATH = "/v1/messages"
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"a": {"type": "null"}}}}
ASK: dict[str, Any] = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def events_of(got: Got) -> list[dict[str, Any]]:
    found = []
    for one in SseReader().push(got.body):
        data = json.loads(one.data)
        assert one.event == data["type"]
        found.append(data)
    return found


@pytest.mark.parametrize("dialect", ["openai", "vllm", "sglang"])
def test_a_foreign_worker_gets_chat_and_the_client_a_message(dialect: str) -> None:
    async def main() -> None:
        message = {"role": "assistant", "content": "Hello", "tool_calls": [CALL]}
        choices = [{"index": 0, "message": message, "finish_reason": "tool_calls"}]
        answer = {"id": "x", "object": "chat.completion", "model": "m", "choices": choices, "usage": usage(20, 5, 7)}
        async with World() as world:
            worker = await world.add("w", answers(answer), dialect=dialect)
            messages = [
                {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"image_url": 1}}],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "ok"}]},
            ]
            line = "x-anthropic-billing-header: cch=1;"
            system = [{"type": "text", "text": line}, {"type": "text", "text": "Be brief."}]
            body = ASK | {"messages": messages, "tools": [TOOL], "system": system, "stop_sequences": ["X"]}
            got = await world.ask(body | {"tool_choice": {"type": "any"}, "new_field": 1}, PATH)
            assert got.status == 200, got.body
            assert worker.paths == ["/v1/chat/completions"]
            sent = worker.jsons[0]
            sent.pop("cache_salt", None)
            call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": '{"image_url": 1}'}}
            assert sent == {
                "model": "m",
                "max_tokens": 50,
                "stop": ["X"],
                "tool_choice": "required",
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "description": "d", "parameters": TOOL["input_schema"]},
                    }
                ],
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "t", "content": "ok"},
                ],
            }
            assert got.json["content"] == [
                {"type": "text", "text": "Hello", "citations": None},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
            ]
            assert got.json["stop_reason"] == "tool_use"
            assert got.json["usage"] == {
                "input_tokens": 15,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 5,
                "output_tokens": 7,
            }
            row = await world.settled()
            assert (row.endpoint, row.prompt_tokens, row.cached_tokens, row.completion_tokens) == ("messages", 20, 5, 7)

    run(main())


def test_a_foreign_stream_is_translated_and_metered() -> None:
    async def main() -> None:
        first = {"index": 0, "id": "c1", "function": {"name": "f", "arguments": ""}}
        more = {"index": 0, "function": {"arguments": '{"a": 1}'}}
        pieces = [
            event({"id": "c1", "model": "m", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
            event({"id": "c1", "choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}),
            chunk("Hel"),
            chunk("lo"),
            event({"id": "c1", "choices": [{"index": 0, "delta": {"tool_calls": [first]}}]}),
            event(
                {"id": "c1", "choices": [{"index": 0, "delta": {"tool_calls": [more]}, "finish_reason": "tool_calls"}]}
            ),
            usage_chunk(20, 5, 7),
            DONE,
        ]
        raw = b"".join(pieces)
        for size in (len(raw), 7):
            async with World() as world:
                parts = [raw[at : at + size] for at in range(0, len(raw), size)]
                worker = await world.add("w", streams(*parts), dialect="openai")
                got = await world.ask(ASK | {"stream": True, "tools": [TOOL]}, PATH)
                assert worker.jsons[0]["stream_options"] == {"include_usage": True}
                found = events_of(got)
                kinds = [one["type"] for one in found]
                assert kinds == [
                    "message_start",
                    "content_block_start",
                    *["content_block_delta"] * 2,
                    "content_block_stop",
                    "content_block_start",
                    "content_block_delta",
                    "content_block_stop",
                    "message_delta",
                    "message_stop",
                ], "the thinking was not asked for"
                assert found[-2]["delta"]["stop_reason"] == "tool_use"
                assert found[-2]["usage"]["cache_read_input_tokens"] == 5
                row = await world.settled()
                assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (20, 5, 7)
        async with World() as world:
            await world.add("w", streams(raw), dialect="vllm")
            got = await world.ask(ASK | {"stream": True, "thinking": {"type": "adaptive"}}, PATH)
            assert {"type": "thinking_delta", "thinking": "hm"} in [one.get("delta") for one in events_of(got)]

    run(main())


def test_a_foreign_stream_that_breaks_ends_with_an_error_event() -> None:
    async def main() -> None:
        async with World() as world:
            await world.add("w", streams(chunk("Hel"), cut=True), dialect="openai")
            found = events_of(await world.ask(ASK | {"stream": True}, PATH))
            assert found[-1]["type"] == "error"
            assert found[-1]["error"]["type"] == "api_error"
            assert found[-1]["error"]["code"] == "worker_lost"

    run(main())


def test_a_failed_worker_is_retried_before_the_first_byte() -> None:
    async def main() -> None:
        choices = [{"index": 0, "message": {"content": "ok"}, "finish_reason": "stop"}]
        good = answers({"id": "x", "choices": choices, "usage": usage(2, 0, 1)})
        async with World() as world:
            await world.add("w", in_turn(drops(), good), dialect="openai")
            await world.add("v", good, dialect="vllm")
            got = await world.ask(ASK, PATH)
            assert (got.status, got.json["content"][0]["text"]) == (200, "ok")

    run(main())


def test_errors_have_anthropics_shape() -> None:
    async def main() -> None:
        key = KeySettings("k", hashlib.sha256(b"secret").hexdigest(), tenant="t")
        async with World(keys=[key]) as world:
            error = {"error": {"message": "too hot", "type": "invalid_request_error", "param": "x", "code": "c"}}
            await world.add("w", answers(error, 400), dialect="openai")
            accepted = [(b"x-api-key", b"secret")]
            for body, headers, status, kind in (
                (ASK, [], 401, "authentication_error"),
                (ASK, [(b"x-api-key", b"wrong")], 401, "authentication_error"),
                (b"{", accepted, 400, "invalid_request_error"),
                (ASK | {"messages": 5}, accepted, 400, "invalid_request_error"),
                (ASK | {"resume": {}}, accepted, 400, "invalid_request_error"),
                (ASK | {"model": "other"}, accepted, 404, "not_found_error"),
                (ASK, accepted, 400, "invalid_request_error"),
            ):
                got = await world.ask(body, PATH, headers)
                assert (got.status, got.json["type"], got.json["error"]["type"]) == (status, "error", kind), got.body
                assert got.json["request_id"] == got.headers["x-request-id"] == got.headers["request-id"]
            assert got.json["error"]["message"] == "too hot"
            counted = await world.ask(ASK, f"{PATH}/count_tokens", accepted)
            assert (counted.status, counted.json["error"]["type"]) == (404, "not_found_error")
            wrong = await world.get(PATH)
            assert (wrong.status, wrong.headers["allow"]) == (405, "POST")

    run(main())


def test_hostile_answers_of_a_foreign_worker_are_failures_not_tracebacks() -> None:
    async def main() -> None:
        for bad in (event(b"{}x"), event({"choices": 5}), event([1]), b"data: " + b"[" * 5000 + b"\n\n"):
            async with World() as world:
                await world.add("w", streams(bad, DONE), dialect="openai")
                got = await world.ask(ASK | {"stream": True}, PATH)
                assert got.status == 502, (bad[:50], got.body)
                assert got.json["error"]["type"] == "api_error"
        async with World() as world:
            await world.add("w", answers(b"[]"), dialect="openai")
            assert (await world.ask(ASK, PATH)).status == 502

    run(main())


def test_a_body_of_very_many_blocks_is_refused() -> None:
    """It would be decoded in the event loop, to be translated."""

    async def main() -> None:
        async with World() as world:
            worker = await world.add("w", answers({}), dialect="vllm")
            content = [{"type": "text", "text": ""}] * 50_000
            got = await world.ask(ASK | {"messages": [{"role": "user", "content": content}]}, PATH)
            assert (got.status, worker.bodies) == (400, [])
            assert "100000 values" in got.json["error"]["message"]

    run(main())

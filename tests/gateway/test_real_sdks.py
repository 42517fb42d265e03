"""The official SDKs of OpenAI and Anthropic, unmodified, through a tool loop against a real gateway and worker.

Responses are validated strictly. Anthropic's SDK is not a dependency of the tests: without it, its tests are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from real_fleet import WORKER_OPTIONS, Process

TURNS = 4
BLOCK_TOKENS = 16
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
ASK = "What is the weather in Paris? Use the tool."


@pytest.fixture(scope="module")
def url(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    work = tmp_path_factory.mktemp("sdks")
    worker = Process(["serve", str(tiny_folder), *WORKER_OPTIONS], work / "worker.log")
    worker.start()
    gateway = Process(["gateway", "--store", "none", "--worker", worker.url, "--alias", "gpt-4o=tiny"], work / "log")
    try:
        gateway.start()
        yield gateway.url
    finally:
        gateway.stop()
        worker.stop()
    assert "Traceback" not in worker.log_path.read_text() + gateway.log_path.read_text()


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_with_anthropics_sdk(url: str, stream: bool) -> None:
    anthropic: Any = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, _strict_response_validation=True)
    messages: list[Any] = [{"role": "user", "content": ASK}]
    prompts = []
    for turn in range(TURNS):
        choice = {"type": "any", "disable_parallel_tool_use": True} if turn % 2 == 0 else {"type": "auto"}
        tools = [{"name": "weather", "description": "The weather in a city", "input_schema": WEATHER}]
        fields = {"model": "tiny", "max_tokens": 60, "tools": tools, "messages": messages, "tool_choice": choice}
        # Claude Code's first block changes with every request.
        line = f"x-anthropic-billing-header: cc_version=2.1; cch={turn};"
        system = [{"type": "text", "text": line}, {"type": "text", "text": "You know the weather."}]
        system[1]["cache_control"] = {"type": "ephemeral"}  # type: ignore[assignment]
        fields |= {"system": system, "extra_body": {"temperature": 0.0, "a_new_field": {"x": 1}}}
        if stream:
            with client.messages.stream(**fields) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**fields)
        usage = message.usage
        prompts.append((usage.input_tokens + usage.cache_read_input_tokens, usage.cache_read_input_tokens))
        messages.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        assert bool(calls) == (message.stop_reason == "tool_use")
        if turn % 2 == 0:
            assert set(calls[0].input) == {"city", "unit"}
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "Sunny"} for call in calls]
        messages.append({"role": "user", "content": results or "Thanks. And tomorrow?"})
    for (sent, _), (_, cached) in pairwise(prompts):
        assert cached >= sent // BLOCK_TOKENS * BLOCK_TOKENS
    counted = client.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": "Hi"}])
    assert counted.input_tokens > 5
    with pytest.raises(anthropic.NotFoundError) as refused:
        client.messages.create(model="none", max_tokens=5, messages=[{"role": "user", "content": "Hi"}])
    assert refused.value.request_id
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model="tiny", max_tokens=5, messages=[])


def whole(client: openai.OpenAI, fields: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    answer: Any = client.chat.completions.create(**fields)
    return answer.choices[0].message.model_dump(include={"role", "content", "tool_calls"}), answer.usage


def streamed(client: openai.OpenAI, fields: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    usage: Any = None
    for chunk in client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                if call.id:
                    message["tool_calls"].append({"id": call.id, "type": "function", "function": {"arguments": ""}})
                function = message["tool_calls"][-1]["function"]
                function["name"] = call.function.name or function.get("name")
                function["arguments"] += call.function.arguments or ""
    return message | {"tool_calls": message["tool_calls"] or None}, usage


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_with_openais_sdk(url: str, stream: bool) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)
    messages: list[Any] = [{"role": "user", "content": ASK}]
    function = {"name": "weather", "description": "The weather in a city", "parameters": WEATHER}
    prompts = []
    for turn in range(TURNS):
        extra = {
            "enable_thinking": False,
            "thinking": {"type": "disabled"},
            "provider": {"order": ["x"]},
            "max_tokens": 60,
        }
        fields: dict[str, Any] = {"model": "gpt-4o", "messages": messages, "temperature": 0, "extra_body": extra}
        fields |= {"tools": [{"type": "function", "function": function}], "parallel_tool_calls": False}
        fields |= {"tool_choice": "required" if turn % 2 == 0 else "auto"}
        message, usage = streamed(client, fields) if stream else whole(client, fields)
        prompts.append((usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens))
        messages.append(message)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "Sunny"} for call in message["tool_calls"] or ()
        ]
        assert results or turn % 2
        messages += results or [{"role": "user", "content": "Thanks. And tomorrow?"}]
    for (sent, _), (_, cached) in pairwise(prompts):
        assert cached >= sent // BLOCK_TOKENS * BLOCK_TOKENS


def test_the_older_forms_of_openais_api(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)
    ask: Any = [{"role": "user", "content": ASK}]
    functions: Any = [{"name": "weather", "parameters": WEATHER}]
    answer = client.chat.completions.create(
        model="tiny", messages=ask, functions=functions, function_call={"name": "weather"}, max_tokens=60
    )
    assert answer.choices[0].message.function_call is not None
    assert client.responses.input_tokens.count(model="tiny", input="Hello").input_tokens > 1
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=ask, max_tokens=1, verbosity="low", store=True
    )
    assert raw.headers["x-ignored-fields"] == "store, verbosity"


def test_logprobs_of_an_echoed_prompt_are_those_of_its_generation(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    fields: dict[str, Any] = {"model": "tiny", "temperature": 0, "logprobs": 2}
    fields |= {"extra_body": {"return_token_ids": True, "ignore_eos": True}}
    said: Any = client.completions.create(prompt="The capital of France is", max_tokens=24, **fields).choices[0]
    ids = [*said.prompt_token_ids, *said.token_ids]
    scored: Any = client.completions.create(prompt=ids, max_tokens=0, echo=True, **fields).choices[0]
    assert scored.logprobs.token_logprobs[0] is None
    assert scored.logprobs.tokens[-24:] == said.logprobs.tokens
    assert scored.logprobs.token_logprobs[-24:] == pytest.approx(said.logprobs.token_logprobs, abs=1e-6)
    assert scored.logprobs.top_logprobs[-24:] == [pytest.approx(top, abs=1e-6) for top in said.logprobs.top_logprobs]

"""The official client, unmodified, against `stoker serve` with SmolLM2: answers make sense, and usage and metrics agree."""

from __future__ import annotations

import json
import random
import re
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from real import STOKER, RealServer, serving, wait_for

BLOCK_TOKENS = 16
MAX_MODEL_TOKENS = 8192
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
STORY: list[Any] = [{"role": "user", "content": "Tell me a story."}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
CLOCK = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC", "CET"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock", "description": "The time", "parameters": CLOCK}},
]
SCHEMAS = {"weather": WEATHER, "clock": CLOCK}
ASK_WEATHER: list[Any] = [
    {"role": "user", "content": "What will the weather be in Paris in the next 3 days, in celsius?"}
]


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    log_path = tmp_path_factory.mktemp("log") / "smollm2"
    with serving(smollm2, log_path, "--served-name", "smollm2", "--kv-memory-gib", "0.5") as server:
        yield server
    assert "Traceback" not in log_path.read_text()


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def chat(client: openai.OpenAI, messages: list[Any], **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 16} | fields
    )


def extra(client: openai.OpenAI, messages: list[Any], **fields: Any) -> str:
    """Return the content of an answer to a request with our own fields."""
    choice = chat(client, messages, extra_body=fields, max_tokens=40).choices[0]
    assert choice.finish_reason == "stop"
    return str(choice.message.content)


# ---- chat


def test_an_answer_makes_sense_and_its_stream_is_the_same(client: openai.OpenAI) -> None:
    whole = chat(client, FRANCE)
    text = whole.choices[0].message.content
    assert "Paris" in text
    assert whole.choices[0].finish_reason == "stop"
    assert whole.model == "smollm2"
    assert whole.system_fingerprint
    chunks = list(chat(client, FRANCE, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_named_tool(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = chat(client, ASK_WEATHER, tools=TOOLS, tool_choice=choice, max_tokens=80).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    assert answer.message.content is None
    assert answer.finish_reason == "stop"


def test_a_required_tool_streamed(client: openai.OpenAI) -> None:
    # At a high temperature, only the grammar keeps the format.
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "temperature": 1.5, "seed": 11}
    fields |= {"model": "smollm2", "messages": ASK_WEATHER, "max_tokens": 100, "parallel_tool_calls": False}
    with client.chat.completions.stream(**fields) as stream:
        answer = stream.get_final_completion().choices[0]
    (call,) = answer.message.tool_calls or []
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert answer.finish_reason == "tool_calls"
    (whole,) = client.chat.completions.create(**fields).choices[0].message.tool_calls
    assert (whole.function.name, whole.function.arguments) == (call.function.name, call.function.arguments)


def test_tools_auto(client: openai.OpenAI) -> None:
    answer = chat(client, ASK_WEATHER, tools=TOOLS, max_tokens=24).choices[0]
    calls = answer.message.tool_calls or []
    assert bool(calls) == (answer.finish_reason == "tool_calls")
    assert calls or answer.message.content
    assert all(call.function.name in SCHEMAS for call in calls)


def test_a_strict_call_that_begins_fits_its_schema(client: openai.OpenAI, server: RealServer) -> None:
    """The model does not call by itself, so that its answer is resumed after the opening tag."""
    begun = server.send("/tokenize", {"prompt": "<tool_call>", "add_special_tokens": False}).json["tokens"]
    tools = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]
    calls = []
    for seed in range(2):
        resume = {"created": 1, "choices": [{"token_ids": begun}] * 2}
        fields = {"tools": tools, "temperature": 1.3, "seed": seed, "n": 2, "max_tokens": 120}
        answer = chat(client, ASK_WEATHER, **fields, extra_body={"resume": resume})
        calls += [call for choice in answer.choices for call in choice.message.tool_calls]
    assert len(calls) >= 4
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_strict_tools_do_not_change_an_answer_without_calls(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]
    loose, strict = (chat(client, FRANCE, tools=given, max_tokens=24).choices[0] for given in (TOOLS, tools))
    assert strict.message.content == loose.message.content
    assert strict.finish_reason == loose.finish_reason


def test_tools_beside_a_format_allow_a_call_or_the_format(client: openai.OpenAI, server: RealServer) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {
            "name": "answer",
            "schema": {
                "type": "object",
                "properties": {"capital": {"enum": ["Paris", "Rome"]}},
                "required": ["capital"],
                "additionalProperties": False,
            },
        },
    }
    fields: dict[str, Any] = {"tools": TOOLS, "response_format": form, "temperature": 1, "max_tokens": 80, "seed": 3}
    begun = server.send("/tokenize", {"prompt": "{", "add_special_tokens": False}).json["tokens"]
    resume = {"created": 1, "choices": [{"token_ids": begun}]}
    answer = chat(client, FRANCE, **fields, extra_body={"resume": resume}).choices[0]
    assert json.loads(answer.message.content)["capital"] in ("Paris", "Rome")
    assert answer.message.tool_calls is None
    begun = server.send("/tokenize", {"prompt": "<tool_call>", "add_special_tokens": False}).json["tokens"]
    resume = {"created": 1, "choices": [{"token_ids": begun}]}
    answer = chat(client, ASK_WEATHER, **fields, parallel_tool_calls=False, extra_body={"resume": resume}).choices[0]
    (call,) = answer.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert answer.finish_reason == "tool_calls"


PATCH_LINES = r"""
start: "*** Begin Patch" LF line+ "*** End Patch"
line: ("+" | "-") /[a-z ]{1,12}/ LF
%import common.LF
"""
PATCH = re.compile(r"\*\*\* Begin Patch\n([-+][a-z ]{1,12}\n)+\*\*\* End Patch")


def test_a_custom_tool_follows_its_grammar_in_chat(client: openai.OpenAI) -> None:
    form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": PATCH_LINES}}
    tools = [{"type": "custom", "custom": {"name": "patch", "description": "Edits.", "format": form}}, *TOOLS]
    choice = {"type": "custom", "custom": {"name": "patch"}}
    fields: dict[str, Any] = {"tools": tools, "tool_choice": choice, "temperature": 1.2, "max_tokens": 90, "seed": 5}
    (call,) = chat(client, ASK_WEATHER, **fields).choices[0].message.tool_calls
    assert (call.type, call.custom.name) == ("custom", "patch")
    assert PATCH.fullmatch(call.custom.input)
    deltas = [chunk.choices[0].delta for chunk in chat(client, ASK_WEATHER, stream=True, **fields)]
    written = [part.custom for delta in deltas for part in delta.tool_calls or ()]
    assert written[0]["name"] == "patch"
    assert "".join(part["input"] for part in written) == call.custom.input
    past = [*ASK_WEATHER, {"role": "assistant", "tool_calls": [call.model_dump()]}]
    past.append({"role": "tool", "tool_call_id": call.id, "content": "Done"})
    assert chat(client, past, tools=tools, max_tokens=1).usage.prompt_tokens > 100


def test_a_custom_tool_follows_its_grammar_in_responses(client: openai.OpenAI) -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": PATCH_LINES}
    tools: Any = [{"type": "custom", "name": "patch", "format": form}]
    fields: dict[str, Any] = {"model": "smollm2", "input": "Fix it", "tools": tools, "max_output_tokens": 90}
    answer = client.responses.create(**fields, tool_choice={"type": "custom", "name": "patch"}, temperature=1.2)
    (item,) = answer.output
    assert item.type == "custom_tool_call"
    assert PATCH.fullmatch(item.input)
    tools[0]["format"]["definition"] = "start: nothing"
    with pytest.raises(openai.BadRequestError, match="nothing") as refused:
        client.responses.create(**fields)
    assert (refused.value.param, refused.value.code) == ("tools", "invalid_grammar")


def test_the_model_reads_the_tool_result(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        *ASK_WEATHER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Snow on all three days"},
    ]
    told = chat(client, messages, tools=TOOLS, max_tokens=4).usage.prompt_tokens
    assert told > chat(client, messages[:-1], tools=TOOLS, max_tokens=1).usage.prompt_tokens


# ---- structured output


def test_json_schema(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    answer = chat(client, ASK_WEATHER, response_format=form, max_tokens=80).choices[0]
    jsonschema.validate(json.loads(answer.message.content), WEATHER)
    assert answer.finish_reason == "stop"


def test_json_object(client: openai.OpenAI) -> None:
    ask = [{"role": "user", "content": 'Repeat exactly this JSON and nothing else: {"name": "Ada"}'}]
    answer = chat(client, ask, response_format={"type": "json_object"}, max_tokens=60).choices[0]
    assert answer.finish_reason == "stop"
    assert isinstance(json.loads(answer.message.content), dict)


def test_regular_expressions_and_grammars(client: openai.OpenAI) -> None:
    pattern = r"\d{3}-\d{4}"
    assert re.fullmatch(pattern, extra(client, STORY, guided_regex=pattern))
    assert re.fullmatch(pattern, extra(client, STORY, response_format={"type": "regex", "regex": pattern}))
    ebnf = 'root ::= answer " " answer\nanswer ::= "yes" | "no"'
    assert set(extra(client, STORY, guided_grammar=ebnf).split(" ")) <= {"yes", "no"}
    choices = ["Berlin", "Paris", "Rome"]
    assert extra(client, FRANCE, structured_outputs={"choice": choices}) == "Paris"


# ---- sampling


def test_logprobs(client: openai.OpenAI) -> None:
    answer = chat(client, FRANCE, logprobs=True, top_logprobs=4).choices[0]
    entries = answer.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == answer.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 4
        assert (entry.top_logprobs[0].bytes, entry.top_logprobs[0].logprob) == (entry.bytes, entry.logprob)
        ranked = [top.logprob for top in entry.top_logprobs]
        assert ranked == sorted(ranked, reverse=True)
        assert all(logprob <= 0 for logprob in ranked)
    drawn = chat(client, STORY, logprobs=True, temperature=1, seed=4, max_tokens=6).choices[0]
    assert all(entry.logprob <= 0 and entry.top_logprobs == [] for entry in drawn.logprobs.content)


def test_seeds_and_choices(client: openai.OpenAI) -> None:
    fields = {"temperature": 1, "max_tokens": 10}
    three = chat(client, STORY, n=3, seed=7, **fields)
    texts = [choice.message.content for choice in three.choices]
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    one = chat(client, STORY, seed=7, **fields)
    assert one.choices[0].message.content == texts[0]
    assert chat(client, STORY, seed=8, **fields).choices[0].message.content not in texts
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    assert three.usage.completion_tokens == 30


def test_stop_strings(client: openai.OpenAI) -> None:
    ask = [{"role": "user", "content": "Count from 1 to 10, with commas."}]
    free = chat(client, ask, max_tokens=24).choices[0].message.content
    stop = free[8:11]  # both inside tokens and between them
    answer = chat(client, ask, max_tokens=24, stop=[stop, "zzz"]).choices[0]
    assert answer.message.content == free[: free.index(stop)]
    assert answer.finish_reason == "stop"


# ---- the other endpoints


def test_responses(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "smollm2", "input": FRANCE, "temperature": 0, "max_output_tokens": 16}
    whole = client.responses.create(**fields)
    assert "Paris" in whole.output_text
    assert whole.status == "completed"
    assert whole.usage is not None
    events = list(client.responses.create(stream=True, **fields))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    schema = {"format": {"type": "json_schema", "name": "clock", "schema": CLOCK, "strict": True}}
    formed = client.responses.create(text=schema, **fields | {"max_output_tokens": 30})
    jsonschema.validate(json.loads(formed.output_text), CLOCK)
    cut = client.responses.create(**fields | {"input": STORY, "max_output_tokens": 3})
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_completions_of_token_ids_and_echo(client: openai.OpenAI, server: RealServer) -> None:
    text = "The capital of France is"
    ids = server.send("/tokenize", {"prompt": text}).json["tokens"]
    fields: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_tokens": 5}
    answers = client.completions.create(prompt=[ids, ids], echo=True, **fields).choices
    assert [answer.index for answer in answers] == [0, 1]
    assert answers[0].text == answers[1].text
    assert answers[0].text.startswith(f"{text} Paris")
    plain = client.completions.create(prompt=text, logprobs=1, **fields).choices[0]
    assert text + plain.text == answers[0].text
    assert "".join(plain.logprobs.tokens) == plain.text
    streamed = client.completions.create(prompt=text, stream=True, **fields)
    assert "".join(chunk.choices[0].text for chunk in streamed) == plain.text


@pytest.mark.parametrize("text", ["Hello, world", "naïve 🦊 ✓ \n\t x", "<|im_start|>user\nhi<|im_end|>"])
def test_tokenize_and_detokenize_are_inverse(server: RealServer, text: str) -> None:
    tokens = server.send("/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == MAX_MODEL_TOKENS
    assert server.send("/detokenize", {"tokens": tokens["tokens"]}).json == {"prompt": text}


def test_tokenize_gives_the_prompt_of_a_chat_request(client: openai.OpenAI, server: RealServer) -> None:
    count = server.send("/tokenize", {"messages": FRANCE}).json["count"]
    assert chat(client, FRANCE, max_tokens=1).usage.prompt_tokens == count


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]


def test_errors_have_the_clients_exception_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="smollm2", prompt=[5] * 9000)
    assert long.value.code == "context_length_exceeded"
    assert "8192" in long.value.message
    assert "9000" in long.value.message
    with pytest.raises(openai.BadRequestError) as words:
        chat(client, [{"role": "user", "content": "word " * 8500}])
    assert re.search(r"8192 tokens.* \(85\d\d in the prompt", words.value.message)
    assert words.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as many:
        chat(client, FRANCE, max_tokens=8190)
    assert (many.value.param, many.value.code) == ("max_tokens", "context_length_exceeded")
    with pytest.raises(openai.NotFoundError) as unknown:
        chat(client, FRANCE, model="gpt-9")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as empty:
        chat(client, [])
    assert empty.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as wrong:
        chat(client, FRANCE, stream=True, response_format={"type": "regex", "regex": "("}, extra_body={})
    assert wrong.value.param == "response_format.regex"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="smollm2", input="x")


# ---- the prefix cache


def cached_tokens(client: openai.OpenAI, prompt: list[int], salt: str) -> int:
    usage = client.completions.create(
        model="smollm2", prompt=prompt, max_tokens=1, extra_body={"cache_salt": salt}
    ).usage
    assert usage is not None
    assert usage.prompt_tokens == len(prompt)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None
    return usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize("length", [15, 16, 17, 48, 49])
def test_a_repeated_prompt_hits_all_its_full_blocks(client: openai.OpenAI, length: int) -> None:
    salt = uuid.uuid4().hex
    prompt = [random.Random(length).randrange(100, 40000) for _ in range(length)]
    assert cached_tokens(client, prompt, salt) == 0
    assert cached_tokens(client, prompt, salt) == (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_changed_token_misses_its_block_and_all_that_follow(client: openai.OpenAI) -> None:
    salt = uuid.uuid4().hex
    rng = random.Random(0)
    prompt = [rng.randrange(100, 40000) for _ in range(70)]
    assert cached_tokens(client, prompt, salt) == 0
    for i in (69, 64, 63, 48, 17, 16, 15, 0):
        changed = [*prompt[:i], prompt[i] + 1, *prompt[i + 1 :]]
        assert cached_tokens(client, changed, salt) == i // BLOCK_TOKENS * BLOCK_TOKENS
    assert cached_tokens(client, prompt, salt) == 64


def test_tenants_share_no_blocks(client: openai.OpenAI) -> None:
    prompt = [random.Random(1).randrange(100, 40000) for _ in range(40)]
    salts = [uuid.uuid4().hex for _ in range(3)]
    assert [cached_tokens(client, prompt, salt) for salt in salts] == [0, 0, 0]
    assert [cached_tokens(client, prompt, salt) for salt in salts] == [32, 32, 32]


def test_a_longer_conversation_hits_its_prefix(client: openai.OpenAI) -> None:
    salt = {"cache_salt": uuid.uuid4().hex}
    first = chat(client, FRANCE, extra_body=salt)
    messages = [*FRANCE, {"role": "assistant", "content": first.choices[0].message.content}]
    messages.append({"role": "user", "content": "And of Italy?"})
    usage = chat(client, messages, extra_body=salt, max_tokens=4).usage
    assert usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS


# ---- metrics


def test_metrics_agree_with_the_usages(client: openai.OpenAI, server: RealServer) -> None:
    before = server.metrics()
    usages = [chat(client, FRANCE, max_tokens=5).usage, chat(client, STORY, n=2, temperature=1, max_tokens=4).usage]
    *_, last = chat(client, FRANCE, max_tokens=6, stream=True, stream_options={"include_usage": True})
    usages.append(last.usage)
    with pytest.raises(openai.BadRequestError):
        chat(client, [])
    answered = 'stoker_requests_total{endpoint="/v1/chat/completions",status="200"}'
    wait_for(lambda: server.metrics()[answered] == before.get(answered, 0) + 3 and server.is_idle)
    after = server.metrics()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("stoker_prompt_tokens_total") == sum(usage.prompt_tokens for usage in usages)
    assert grown("stoker_generated_tokens_total") == sum(usage.completion_tokens for usage in usages)
    assert grown("stoker_cached_tokens_total") == sum(u.prompt_tokens_details.cached_tokens for u in usages)
    assert grown('stoker_requests_total{endpoint="/v1/chat/completions",status="400"}') == 1
    assert grown("stoker_ttft_seconds_count") == 3


# ---- the command line


def test_chat_from_a_pipe(server: RealServer) -> None:
    command = [STOKER, "chat", "--url", server.url, "--temperature", "0", "--max-tokens", "12"]
    done = subprocess.run(command, input=FRANCE[0]["content"] + "\n", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_bench(server: RealServer, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    command = [STOKER, "bench", "serve", "--url", server.url, "--num-requests", "4", "--concurrency", "2"]
    command += ["--input-tokens", "24", "--output-tokens", "32", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())["results"]
    assert (results["requests"], results["failed"], results["output_tokens"]) == (4, 0, 128)
    assert results["hit_ratio"] == results["cached_tokens"] / results["prompt_tokens"]
    assert all(results[name]["p50"] > 0 for name in ("ttft_ms", "e2e_ms"))
    assert results["itl_ms"]["max"] > 0  # most may be 0: a busy client reads several chunks at once

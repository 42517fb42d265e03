"""What clients of other servers send is honoured or ignored, never a reason to refuse a request."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from http_server import Server

COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
# It prints its switches, so that the prompt shows them.
TEMPLATE = (
    "{% if enable_thinking is defined %}[{{ enable_thinking }} {{ thinking }}]{% endif %}"
    "{% if reasoning_effort is defined %}({{ reasoning_effort }}){% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments.a }}>{% endfor %};{% endfor %}"
    "{% if tools %}{{ tools | length }}{% endif %}"
)
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
USER = {"role": "user", "content": "hi"}


def prompt_of(server: Server) -> str:
    request = server.service.requests[-1]
    return server.text.tokenizer.decode(request.token_ids[: request.num_prompt])


def metric(server: Server) -> dict[str, float]:
    lines = server.send("/metrics").body.decode().splitlines()
    found = [line for line in lines if line.startswith("stoker_unknown_fields_total")]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in found}


def test_an_unknown_field_is_accepted_counted_and_logged_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [USER]}),
        (COMPLETIONS, {"prompt": "a"}),
        (RESPONSES, {"input": "a", "new_metadata": {"x": 1}}),
        ("/tokenize", {"prompt": "a"}),
    ):
        answer = server.send(path, body | {"bogus": {"deep": [1]}, "provider": None})
        assert answer.status == 200, answer.body
    assert metric(server) == {"bogus": 4, "provider": 4, "new_metadata": 1}
    logged = [record.fields["field"] for record in caplog.records if record.message == "unknown_field"]
    assert sorted(logged) == ["bogus", "new_metadata", "provider"]


def test_the_names_of_unknown_fields_are_bounded(server: Server) -> None:
    for number in range(3):
        assert server.chat(**{f"made_up_{number}_{i}": 1 for i in range(500)}).status == 200
    assert server.chat(**{'bad"name\n': 1, "x" * 5000: 1}).status == 200
    counts = metric(server)
    assert len(counts) <= 65
    assert sum(counts.values()) == 1502


def test_strict_refuses_an_unknown_field(start_server: Callable[..., Server]) -> None:
    strict = start_server(strict=True)
    answer = strict.chat(bogus=1)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, "bogus", "unknown_parameter")
    assert strict.chat(enable_thinking=None, cache_prompt=True).status == 200


def test_a_wrong_known_field_beside_an_unknown_one_is_named(server: Server) -> None:
    answer = server.chat(bogus=1, temperature="hot")
    assert (answer.status, answer.error["param"]) == (400, "temperature")
    assert server.chat(bogus=1, structured_outputs={"what": 1}).error["param"] == "structured_outputs.what"


def test_deep_nesting_in_an_unknown_field_is_refused(server: Server) -> None:
    body = b'{"messages":[{"role":"user","content":"a"}],"bogus":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    answer = server.send("/v1/chat/completions", body)
    assert (answer.status, answer.error["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"enable_thinking": False}, "[False False]"),
        ({"enable_thinking": True}, "[True True]"),
        ({"thinking": {"type": "disabled"}}, "[False False]"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "[True True]"),
        ({"thinking": True}, "[True True]"),
        ({"think": False}, "[False False]"),
        ({"think": "high"}, "(high)"),
        ({"reasoning": {"effort": "low"}}, "(low)"),
        ({"reasoning": {"enabled": False}}, "[False False]"),
        ({"reasoning_effort": "none"}, "[False False](none)"),
        ({"chat_template_kwargs": {"thinking": True}, "enable_thinking": False}, "[True True]"),
    ],
)
def test_every_switch_for_thinking_reaches_the_template(
    start_server: Callable[..., Server], fields: dict[str, Any], expected: str
) -> None:
    server = start_server(template=TEMPLATE)
    assert server.chat(**fields).status == 200
    assert prompt_of(server) == f"{expected}user:Say hello;"


def test_the_reasoning_can_be_left_out(start_server: Callable[..., Server]) -> None:
    server = start_server(template="{% for m in messages %}{{ m.content }}{% endfor %}{# <think> </think> #}")
    server.say("<think>hm, well</think>Hi")
    shown = server.chat().json
    assert shown["choices"][0]["message"]["reasoning_content"] == "hm, well"
    for fields in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        hidden = server.chat(**fields).json
        assert "reasoning_content" not in hidden["choices"][0]["message"]
        assert hidden["choices"][0]["message"]["content"] == "Hi"
        assert hidden["usage"] == shown["usage"]
        chunks = server.chat(stream=True, **fields).chunks
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "Hi"
        assert not any("reasoning" in chunk["choices"][0]["delta"] for chunk in chunks)


def test_limits_on_tokens(server: Server) -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        assert server.chat(**{field: -1}).status == 200
        assert server.service.requests[-1].max_new_tokens > 1000
    assert server.send(RESPONSES, {"input": "a", "max_output_tokens": -1}).status == 200
    body = {"prompt": "0123456789", "truncate_prompt_tokens": 4}
    assert server.send(COMPLETIONS, body).json["usage"]["prompt_tokens"] == 4
    assert prompt_of(server) == "6789"
    long = {"prompt": "x" * 3000, "truncate_prompt_tokens": -1, "max_tokens": 48}
    assert server.send(COMPLETIONS, long).json["usage"]["prompt_tokens"] == 2000
    assert server.chat("x" * 3000, truncate_prompt_tokens=100).json["usage"]["prompt_tokens"] == 100


def test_usage_as_openrouter_asks_for_it(server: Server) -> None:
    assert server.chat(stream=True, usage={"include": True}).chunks[-1]["usage"]["prompt_tokens"]
    assert "usage" not in server.chat(stream=True, usage={"include": False}).chunks[-1]


def test_a_schema_beside_json_object_is_used(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for form in (
        {"type": "json_object", "schema": schema},
        {"type": "json_object", "json_schema": {"schema": schema}},
        {"type": "json_schema", "json_schema": {"schema": schema}},
    ):
        assert server.chat(response_format=form).status == 200
        grammar = server.service.requests[-1].sampling.grammar
        assert grammar is not None
        assert (grammar.kind, json.loads(grammar.text)) == ("json_schema", schema)
    for fields, kind in (
        ({"regex": "a+"}, "regex"),
        ({"ebnf": 'root ::= "a"'}, "ebnf"),
        ({"json_schema": "{}"}, "json_schema"),
    ):
        assert server.chat(**fields).status == 200
        grammar = server.service.requests[-1].sampling.grammar
        assert grammar is not None
        assert grammar.kind == kind


def test_other_names_of_sampling_fields(server: Server) -> None:
    assert server.chat(repeat_penalty=1.5).status == 200
    assert server.service.requests[-1].sampling.repetition_penalty == 1.5


def test_arguments_of_past_calls_may_be_objects_or_null(start_server: Callable[..., Server]) -> None:
    server = start_server(template=TEMPLATE)
    for arguments in ({"a": 5}, '{"a": 5}'):
        call = {"id": "c", "type": None, "index": 0, "function": {"name": "f", "arguments": arguments}}
        messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
        assert server.chat(messages=messages).status == 200
        assert prompt_of(server) == "user:hi;assistant:<f 5>;"
    call = {"id": "c", "function": {"name": "f", "arguments": None}}
    assert server.chat(messages=[USER, {"role": "assistant", "tool_calls": [call]}]).status == 200


# ---- the older form of tools


def test_functions_are_answered_in_their_own_form(server: Server) -> None:
    server.say('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    whole = server.chat(functions=[FUNCTION]).json["choices"][0]
    assert whole["message"]["function_call"] == {"name": "f", "arguments": '{"a": 1}'}
    assert "tool_calls" not in whole["message"]
    assert whole["finish_reason"] == "function_call"
    chunks = [chunk["choices"][0] for chunk in server.chat(functions=[FUNCTION], stream=True).chunks]
    calls = [chunk["delta"]["function_call"] for chunk in chunks if "function_call" in chunk["delta"]]
    assert calls[0]["name"] == "f"
    assert "".join(call["arguments"] for call in calls) == '{"a": 1}'
    assert chunks[-1]["finish_reason"] == "function_call"
    named = server.chat(functions=[FUNCTION], function_call={"name": "f"}).json["choices"][0]
    assert named["finish_reason"] == "stop"
    assert server.service.requests[-1].sampling.grammar is not None
    none = server.chat(functions=[FUNCTION], function_call="none").json["choices"][0]
    assert none["message"]["content"].startswith("<tool_call>")


def test_the_prompt_of_functions_is_that_of_tools(start_server: Callable[..., Server]) -> None:
    server = start_server(template=TEMPLATE)
    call = {"name": "f", "arguments": '{"a": 7}'}
    older = [USER, {"role": "assistant", "content": None, "function_call": call}]
    older.append({"role": "function", "name": "f", "content": "done"})
    assert server.chat(messages=older, functions=[FUNCTION]).status == 200
    assert prompt_of(server) == "user:hi;assistant:<f 7>;tool:done;1"


# ---- echo with logprobs


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(server: Server, stream: bool) -> None:
    server.say(lambda request: server.text.tokenizer.decode(list(request.sampling.logit_bias) or [40]))
    body = {"prompt": "abc", "echo": True, "logprobs": 2, "max_tokens": 1, "stream": stream}
    answer = server.send(COMPLETIONS, body)
    assert answer.status == 200, answer.body
    choices = [chunk["choices"][0] for chunk in (answer.chunks if stream else [answer.json])]
    logprobs = {name: [x for one in choices for x in one["logprobs"][name]] for name in choices[0]["logprobs"]}
    text = "".join(one["text"] for one in choices)
    assert text.startswith("abc")
    assert "".join(logprobs["tokens"]) == text
    assert logprobs["text_offset"] == list(range(len(text)))
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert all(len(top) >= 2 for top in logprobs["top_logprobs"][1:])
    # Each position was sampled after the tokens before it.
    forced = [one for one in server.service.requests if one.sampling.logit_bias]
    assert sorted(server.text.tokenizer.decode(one.token_ids) for one in forced) == ["a", "ab"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_can_be_scored_without_an_answer(server: Server, stream: bool) -> None:
    server.say(lambda request: server.text.tokenizer.decode(list(request.sampling.logit_bias) or [40]))
    body = {"prompt": "abc", "echo": True, "logprobs": 0, "max_tokens": 0, "stream": stream}
    answer = server.send(COMPLETIONS, body)
    (choice,) = [one["choices"][0] for one in (answer.chunks if stream else [answer.json])]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    if not stream:
        assert answer.json["usage"]["completion_tokens"] == 0


# ---- fields that have no effect


def test_fields_without_effect_are_named_in_a_header(server: Server) -> None:
    fields = {"web_search_options": {}, "verbosity": "low", "store": True, "service_tier": "priority"}
    answer = server.chat(**fields)
    assert answer.status == 200
    assert answer.headers["X-Ignored-Fields"] == "service_tier, store, verbosity, web_search_options"
    assert "X-Ignored-Fields" in server.chat(stream=True, **fields).headers
    harmless = {"store": False, "service_tier": "flex", "verbosity": None, "prediction": None}
    assert "X-Ignored-Fields" not in server.chat(**harmless).headers
    codex = {"input": "a", "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}}
    assert server.send(RESPONSES, codex).headers["X-Ignored-Fields"] == "reasoning.summary"


# ---- counting


def test_the_tokens_of_a_prompt_are_counted_without_an_answer(server: Server) -> None:
    tools = [{"type": "function", "name": "f", "parameters": FUNCTION["parameters"]}]
    body = {"input": "Hello", "instructions": "Be brief.", "tools": tools}
    before = len(server.service.requests)
    counted = server.send("/v1/responses/input_tokens", body)
    assert counted.status == 200, counted.body
    assert len(server.service.requests) == before
    used = server.send(RESPONSES, body).json["usage"]["input_tokens"]
    assert counted.json == {"object": "response.input_tokens", "input_tokens": used}
    too_long = server.send("/v1/responses/input_tokens", {"input": "x" * 3000})
    assert too_long.json["input_tokens"] > 3000
    assert server.send("/v1/responses/input_tokens", {"input": 5}).error["param"] == "input"


# ---- volatile lines


def test_a_billing_line_does_not_reach_the_prompt(server: Server, start_server: Callable[..., Server]) -> None:
    system = "x-anthropic-billing-header: cc_version=2.1; cch=abc;\n\nYou are a coding agent."
    messages = [{"role": "system", "content": system}, USER]
    assert server.chat(messages=messages).status == 200
    assert "billing" not in prompt_of(server)
    assert "system\nYou are a coding agent." in prompt_of(server)
    late = [{"role": "system", "content": f"Hello\n{system}"}, USER]
    assert server.chat(messages=late).status == 200
    assert "billing" in prompt_of(server), "only lines in front are left out"
    keeping = start_server(volatile_lines=("",))
    assert keeping.chat(messages=messages).status == 200
    assert "billing" in prompt_of(keeping)


def test_very_many_volatile_lines_take_linear_time(server: Server) -> None:
    lines = "x-anthropic-billing-header: a\n" * 300_000  # hours, if each line copied the rest
    assert server.chat(messages=[{"role": "system", "content": f"{lines}Hi"}, USER]).status == 200
    assert "system\nHi" in prompt_of(server)
    assert server.chat(messages=[{"role": "system", "content": lines}, USER]).status == 200


# ---- CORS


def test_pages_of_allowed_origins_may_call(start_server: Callable[..., Server]) -> None:
    server = start_server(cors_origins=("https://a.example",))
    asked = {"Origin": "https://a.example", "Access_Control_Request_Method": "POST"}
    asked["Access_Control_Request_Headers"] = "authorization,content-type"
    preflight = server.send("/v1/chat/completions", method="OPTIONS", **asked)
    assert preflight.status == 204
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
    other = server.send("/v1/models", Origin="https://b.example")
    assert "access-control-allow-origin" not in other.headers
    assert server.send("/v1/models", Origin="https://a.example").headers["vary"] == "origin"
    refused = server.send("/v1/chat/completions", {"messages": 5}, Origin="https://a.example")
    assert refused.headers["access-control-allow-origin"] == "https://a.example"

"""Every wrong request gets an error in OpenAI's format that names the field, and never reaches the engine."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
from http_server import Server
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.proto.openai.chat import ChatRequest
from stoker.proto.openai.completions import CompletionRequest
from stoker.proto.openai.responses import ResponsesRequest
from stoker.sched.request import Finish

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}

NOT_JSON = [b"", b"{", b'{"messages": [}', b"nonsense", b'{"temperature": NaN}', b'{"temperature": Infinity}']
NOT_JSON += [b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"model": "\xff\xfe"}', b"\x00", b"\xff"]
NOT_JSON += [b'{"metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001]


@pytest.mark.parametrize("body", NOT_JSON, ids=range(len(NOT_JSON)))
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, "/tokenize", "/detokenize"])
def test_a_body_that_is_not_json_is_refused(shared: Server, path: str, body: bytes) -> None:
    answer = shared.send(path, body)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": ...}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": 5, "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [USER, "hi"]}, "messages[1]"),
    ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
    ({"messages": [USER, {"role": "tool", "content": "x", "tool_call_id": "c1"}]}, "messages[1].tool_call_id"),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "content": "", "tool_call_id": ""},
            ]
        },
        "messages[1].tool_call_id",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].name"),
    ({"model": 5}, "model"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 129}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": "1"}, "n"),
    ({"n": True}, "n"),
    ({"n": 10**400}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 2048}, "max_tokens"),
    ({"max_completion_tokens": 4096}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"top_k": -2}, "top_k"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": [str(i) for i in range(17)]}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop_token_ids": [99999]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ({"repetition_penalty": 1e-40}, "repetition_penalty"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"timeout_s": 0}, "timeout_s"),
    ({"priority": 2**40}, "priority"),
    ({"prompt_token_ids": [1, 99999]}, "prompt_token_ids[1]"),
    ({"prompt_token_ids": [1.5]}, "prompt_token_ids[0]"),
    ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params.do_remote_decode"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"return_hidden_states": True}, "return_hidden_states"),
    ({"include_reasoning": 0}, "include_reasoning"),
    ({"functions": {}}, "functions"),
    ({"functions": [{"name": "a b"}]}, "functions[0].name"),
    ({"functions": [{"name": "f"}], "tools": [TOOL]}, "functions"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
    ({"function_call": {"name": "g"}}, "function_call"),
    ({"enable_thinking": "yes"}, "enable_thinking"),
    ({"thinking": 5}, "thinking"),
    ({"thinking": {"type": 5}}, "thinking.type"),
    ({"reasoning": {"effort": 3}}, "reasoning.effort"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": "5"}, "truncate_prompt_tokens"),
    ({"add_special_tokens": "no"}, "add_special_tokens"),
    ({"usage": {"include": "x"}}, "usage.include"),
    ({"regex": 5}, "regex"),
    ({"json_schema": "{"}, "json_schema"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "regex"}}, "response_format.regex"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_grammar": 'root ::= "a"\n' * 6000}, "guided_grammar"),
    ({"response_format": {"type": "regex", "regex": "a" * 65_537}}, "response_format.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"guided_choice": [str(number) for number in range(20_001)]}, "guided_choice"),
    ({"structured_outputs": {"what": 1}}, "structured_outputs.what"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 129}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
        "tools[0].function.parameters",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes", "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": "required", "tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
]


@pytest.mark.parametrize(("fields", "param"), FIELDS, ids=[str(fields)[:60] for fields, _ in FIELDS])
def test_a_wrong_field_is_named(shared: Server, fields: dict[str, Any], param: str) -> None:
    before = len(shared.service.requests)
    answer = shared.chat(**fields)
    assert (answer.status, answer.error["type"], answer.error["param"]) == (400, "invalid_request_error", param)
    assert answer.error["message"]
    assert len(shared.service.requests) == before


OTHERS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", [1]], "n": 100}, "n"),
    (COMPLETIONS, {"prompt": [[1], [99999]]}, "prompt[1][0]"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
    (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (RESPONSES, {}, "input"),
    (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"input": 5}, "input"),
    (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSES, {"input": "a", "background": True}, "background"),
    (RESPONSES, {"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input[0].call_id"),
    (RESPONSES, {"input": "a", "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    (RESPONSES, {"input": "a", "tools": [{"type": "function"}]}, "tools[0].name"),
    (RESPONSES, {"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    (RESPONSES, {"input": "a", "max_output_tokens": 9999}, "max_output_tokens"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [99999]}, "tokens[0]"),
]


@pytest.mark.parametrize(("path", "body", "param"), OTHERS, ids=[f"{p} {b}"[:60] for p, b, _ in OTHERS])
def test_the_other_endpoints_name_the_wrong_field_too(
    shared: Server, path: str, body: dict[str, Any], param: str
) -> None:
    answer = shared.send(path, body)
    assert (answer.status, answer.error["type"], answer.error["param"]) == (400, "invalid_request_error", param)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, "/tokenize"])
def test_an_unknown_model(shared: Server, path: str) -> None:
    body = {CHAT: {"messages": [USER]}, RESPONSES: {"input": "a"}}.get(path, {"prompt": "a"})
    answer = shared.send(path, body | {"model": "gpt-9"})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")


def test_a_request_without_a_model_or_with_an_alias_gets_the_served_model(shared: Server) -> None:
    assert shared.chat(model=...).json["model"] == "tiny"
    assert shared.chat(model="tiny-alias").json["model"] == "tiny"


def test_the_error_for_a_too_long_prompt_contains_both_numbers(shared: Server) -> None:
    answer = shared.chat("x" * 3000)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert "2048" in answer.error["message"]
    prompt = shared.send("/tokenize", {"messages": [{"role": "user", "content": "x" * 3000}]}).json["count"]
    assert f"{prompt} in the prompt" in answer.error["message"]
    for path, field in ((COMPLETIONS, "prompt"), (RESPONSES, "input"), ("/tokenize", "prompt")):
        answer = shared.send(path, {field: "x" * 3_000_000})
        assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "context_length_exceeded", field)
    answer = shared.chat(max_tokens=2040)
    assert answer.error["code"] == "context_length_exceeded"
    assert "2040 in the completion" in answer.error["message"]


def test_unknown_paths_and_methods_are_refused(shared: Server) -> None:
    assert shared.send("/v1/nothing").error["code"] == "unknown_url"
    assert shared.send("/v1/nothing").status == 404
    answer = shared.send(CHAT)
    assert (answer.status, answer.error["code"], answer.headers["Allow"]) == (405, "method_not_allowed", "POST")
    assert shared.send(CHAT, b"x", Content_Type="multipart/form-data; boundary=x").status == 415


def test_a_body_of_ten_megabytes_is_answered_or_refused(start_server: Callable[..., Server]) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 10_000_000}]}).encode()
    answer = start_server().send(CHAT, body)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    small = start_server(max_body_bytes=1 << 20)
    answer = small.send(CHAT, body)
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")
    assert small.chat().status == 200


def test_a_chunked_body_over_the_limit_is_refused(start_server: Callable[..., Server]) -> None:
    server = start_server(max_body_bytes=1000)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        client.sendall(b"800\r\n" + b"x" * 0x800 + b"\r\n0\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_body_that_never_arrives_times_out(start_server: Callable[..., Server]) -> None:
    server = start_server(body_read_s=0.2)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        assert client.recv(4096).startswith(b"HTTP/1.1 408")


def test_fields_without_effect_at_openai_are_ignored(shared: Server) -> None:
    answer = shared.chat(
        store=True,
        metadata={"a": "b"},
        user="me",
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
        verbosity="low",
        reasoning_effort="low",
        modalities=["text"],
        prediction={"type": "content", "content": "x"},
        parallel_tool_calls=True,
        session_id="s",
        temperature=None,
        stop=None,
        tools=[],
    )
    assert answer.status == 200


def test_an_invalid_grammar_is_a_400(server: Server) -> None:
    server.say("", ends=Finish("error", error_code="invalid_grammar", error_message="unbalanced '('"))
    for stream in (False, True):
        answer = server.chat(response_format={"type": "regex", "regex": "("}, stream=stream)
        assert (answer.status, answer.error["code"]) == (400, "invalid_grammar")
        assert answer.error["param"] == "response_format.regex"
    for code in ("kv_too_small", "duplicate_lease", "unknown_token"):
        server.say("", ends=Finish("error", error_code=code, error_message="needs 99 blocks, there are 64"))
        assert server.chat().status == 400
    server.say("", ends=Finish("error", error_code="oops", error_message="broken"))
    assert server.chat().status == 500
    server.say("", ends=Finish("deadline"))
    answer = server.chat(timeout_s=0.5)
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")


FORCED = '"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": %s}}]'
DEEP = [
    (CHAT, '{"messages": [{"role": "user", "content": "hi"}], "guided_json": %s}'),
    (CHAT, '{"messages": [{"role": "user", "content": "hi"}], ' + FORCED + "}"),
    (RESPONSES, '{"input": "a", "stream": true, "metadata": %s}'),
]


@pytest.mark.parametrize(("path", "body"), DEEP, ids=["guided_json", "tools", "metadata"])
def test_json_that_is_nested_too_deeply_to_be_encoded_again_is_a_400(shared: Server, path: str, body: str) -> None:
    """It is encoded again inside a grammar, or inside the first event, which nests it deeper."""
    for depth in range(965, 995):
        answer = shared.send(path, (body % ('{"a": ' * depth + "{}" + "}" * depth)).encode())
        if answer.status != 200:
            assert (answer.status, answer.error["type"]) == (400, "invalid_request_error"), depth
    assert answer.status == 400


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6)
    | st.sampled_from(["text", "function", "auto", "json_schema", "user", "tool", "assistant", 10**40, -1, 1e308, 0]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "function", "name", "parameters", "schema", "tool_calls", "text"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
ENDPOINTS = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest, RESPONSES: ResponsesRequest}


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(list(ENDPOINTS)))
def test_no_request_body_causes_a_500(shared: Server, data: st.DataObject, path: str) -> None:
    names = ENDPOINTS[path].__struct_fields__
    body = {"messages": [USER]} if path == CHAT else {"prompt": "a"} if path == COMPLETIONS else {"input": "a"}
    body |= data.draw(st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=3))
    answer = shared.send(path, body)
    assert answer.status in (200, 400, 404), answer.body
    assert answer.status == 200 or answer.error["message"]


def test_bytes_that_are_not_http_are_refused(shared: Server) -> None:
    with socket.create_connection(("127.0.0.1", shared.port), timeout=60) as client:
        client.sendall(b"\x16\x03\x01\x00\xff\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.")
    assert shared.chat().status == 200

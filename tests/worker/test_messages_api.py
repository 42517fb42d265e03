"""`/v1/messages`: what Anthropic's clients send and expect, on the same path as chat."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from http_server import Answer, Server

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TOOL = {
    "name": "weather",
    "description": "The weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
CALLING = 'Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
THINKING_TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{# <think> </think> #}"


def ask(server: Server, content: Any = "Hello", path: str = PATH, **fields: Any) -> Answer:
    body = {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": content}]} | fields
    return server.send(path, {name: value for name, value in body.items() if value is not ...})


def prompt_of(server: Server) -> str:
    request = server.service.requests[-1]
    return server.text.tokenizer.decode(request.token_ids[: request.num_prompt], skip_special_tokens=False)


def joined(answer: Answer) -> dict[str, Any]:
    """Build the message from the events of a stream, as a client does it, and check their order."""
    events = [(event.event, json.loads(event.data)) for event in answer.events]
    assert all(name == data["type"] for name, data in events)
    assert [name for name, _ in events[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = events[0][1]["message"]
    assert (events[0][0], message["content"], message["stop_reason"]) == ("message_start", [], None)
    is_open, partial = False, ""
    for name, data in events[1:-2]:
        if name == "content_block_start":
            assert not is_open
            assert data["index"] == len(message["content"])
            message["content"].append(data["content_block"])
            is_open, partial = True, ""
            continue
        assert is_open
        block, is_open = message["content"][data["index"]], name != "content_block_stop"
        delta = data.get("delta", {})
        match delta.get("type"):
            case "text_delta":
                block["text"] += delta["text"]
            case "thinking_delta":
                block["thinking"] += delta["thinking"]
            case "signature_delta":
                block["signature"] = delta["signature"]
            case "input_json_delta":
                partial += delta["partial_json"]
            case None if partial:
                block["input"] = json.loads(partial)
    assert not is_open
    message |= events[-2][1]["delta"]
    message["usage"] = events[-2][1]["usage"]
    return message


def same(server: Server, *args: Any, **fields: Any) -> dict[str, Any]:
    """Ask twice, whole and as a stream. Return the message, which must be the same."""
    whole = ask(server, *args, **fields)
    assert whole.status == 200, whole.body
    streamed = ask(server, *args, stream=True, **fields)
    assert streamed.status == 200, streamed.body
    assert without_ids(joined(streamed)) == without_ids(whole.json)
    return whole.json


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """They are derived from the request's id."""
    return message | {"id": "", "content": [block | {"id": ""} for block in message["content"]]}


def test_a_text_answer(server: Server) -> None:
    server.say("Hello, wörld", cached_tokens=16)
    message = same(server)
    assert message["content"] == [{"type": "text", "text": "Hello, wörld", "citations": None}]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "tiny")
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["id"].startswith("msg_")
    usage = message["usage"]
    assert usage["cache_read_input_tokens"] == 16
    assert usage["input_tokens"] + 16 == len(prompt_of(server).replace("<|im_start|>", "1").replace("<|im_end|>", "1"))
    assert usage["output_tokens"] == len("Hello, wörld".encode()) + 1


def test_stop_reasons(server: Server) -> None:
    server.say("one two three")
    message = same(server, stop_sequences=["two", "three"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "two")
    assert message["content"][0]["text"] == "one "
    assert same(server, max_tokens=3)["stop_reason"] == "max_tokens"
    server.say("")
    assert same(server)["content"] == []


def test_a_limit_beyond_the_context_means_the_rest_of_the_context(server: Server) -> None:
    server.say("x" * 5000)
    message = same(server, max_tokens=32_000)
    assert message["stop_reason"] == "model_context_window_exceeded"
    too_long = ask(server, "x" * 3000)
    assert (too_long.status, too_long.json["error"]["type"]) == (400, "invalid_request_error")


def test_a_tool_call(server: Server) -> None:
    server.say(CALLING)
    message = same(server, tools=[TOOL])
    text, call = message["content"]
    assert text["text"] == "Let me see."
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Oslo", "days": 3})
    assert call["id"]
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        ({"type": "auto"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "weather", "disable_parallel_tool_use": True}, True),
        ({"type": "none"}, False),
    ],
)
def test_tool_choice(server: Server, choice: dict[str, Any], forced: bool) -> None:
    server.say(CALLING)
    message = ask(server, tools=[TOOL], tool_choice=choice).json
    assert (server.service.requests[-1].sampling.grammar is not None) == forced
    assert any(block["type"] == "tool_use" for block in message["content"]) == (choice["type"] != "none")
    assert ("weather" in prompt_of(server)) == (choice["type"] != "none")


def test_the_prompt_is_that_of_the_same_chat(server: Server) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
                {"type": "tool_use", "id": "t2", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Snow"}]},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    assert ask(server, messages=messages, system=system, tools=[TOOL]).status == 200
    prompt = prompt_of(server)
    function = {"name": "weather", "description": "The weather", "parameters": TOOL["input_schema"]}
    calls = [
        {"id": name, "type": "function", "function": {"name": "weather", "arguments": arguments}}
        for name, arguments in (("t1", '{"city": "Oslo"}'), ("t2", "{}"))
    ]
    chat = [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls, "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "t1", "content": "Snow"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error"},
        {"role": "user", "content": "And?"},
    ]
    tools = [{"type": "function", "function": function}]
    assert server.chat(messages=chat, tools=tools, enable_thinking=False).status == 200
    assert prompt == prompt_of(server)


def test_what_a_text_model_cannot_read_in_a_tool_result_does_not_end_the_conversation(server: Server) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    messages = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "read", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [image]}]},
    ]
    assert ask(server, messages=messages, tools=[TOOL]).status == 200
    assert "[image left out: this model reads only text]" in prompt_of(server)
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
    assert ask(server, [document, {"type": "text", "text": "?"}]).status == 200
    assert "T\nD\n?" in prompt_of(server)


def test_an_answer_that_the_client_has_begun_is_continued(server: Server) -> None:
    messages = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "The answer is"}]
    assert ask(server, messages=messages).status == 200
    assert prompt_of(server).endswith("The answer is")


def test_thinking_is_shown_only_if_the_client_wants_it(start_server: Callable[..., Server]) -> None:
    server = start_server(template=THINKING_TEMPLATE)
    server.say("<think>well</think>Hi")
    message = same(server, thinking={"type": "enabled", "budget_tokens": 1024})
    assert message["content"][0] == {"type": "thinking", "thinking": "well", "signature": "stoker"}
    assert message["content"][1]["text"] == "Hi"
    for thinking in (..., {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}):
        hidden = ask(server, thinking=thinking).json
        assert [block["type"] for block in hidden["content"]] == ["text"]
        assert hidden["usage"] == message["usage"]


def test_a_late_system_message_is_normalised(start_server: Callable[..., Server]) -> None:
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
        "{{ m.role }}:{{ m.content }};{% endfor %}"
    )
    server = start_server(template=strict)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "system", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    assert ask(server, messages=messages, system="s").status == 200
    assert prompt_of(server) == "system:s;user:a;assistant:b;user:c;user:d;"
    chat = [{"role": "system", "content": "s"}, {"role": "developer", "content": "t"}, *messages]
    assert server.chat(messages=chat).status == 200
    assert prompt_of(server) == "system:s\nt;user:a;assistant:b;user:c;user:d;"
    assert ask(start_server(), messages=messages, system="s").status == 200


def test_claude_codes_billing_line_does_not_reach_the_prompt(server: Server) -> None:
    prompts = []
    for number in range(2):
        line = f"x-anthropic-billing-header: cc_version=2.1.{number}; cc_entrypoint=cli; cch={number};"
        system = [{"type": "text", "text": line}, {"type": "text", "text": "You are Claude Code."}]
        assert ask(server, system=system).status == 200
        prompts.append(prompt_of(server))
    assert prompts[0] == prompts[1]
    assert "system\nYou are Claude Code." in prompts[0]


def test_a_turn_as_claude_code_sends_it(start_server: Callable[..., Server]) -> None:
    """All of its fields in one request: a second turn with the result of a tool, and thinking between calls."""
    tools_template = "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}<tool_call></tool_call>{% endif %}"
    server = start_server(template=THINKING_TEMPLATE + tools_template)
    server.say("<think>well</think>" + CALLING)
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sun"}]}
    fields: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, call]},
            {"role": "user", "content": [result | {"cache_control": {"type": "ephemeral", "ttl": "1h"}}]},
        ],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=abc;"},
            {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "user_1_account__session_2"},
        "temperature": 1,
    }
    message = same(server, **fields)
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert message["content"][2]["input"] == {"city": "Oslo", "days": 3}
    assert message["stop_reason"] == "tool_use"
    prompt = prompt_of(server)
    assert "billing" not in prompt
    assert "You are Claude Code." in prompt
    counted = ask(
        server, path=COUNT, max_tokens=..., **{name: fields[name] for name in ("messages", "system", "tools")}
    )
    assert (
        counted.json["input_tokens"] == message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]
    )
    streamed = ask(server, stream=True, **fields)
    order = [(event.event, json.loads(event.data)) for event in streamed.events]
    kinds = [data["content_block"]["type"] for name, data in order if name == "content_block_start"]
    assert kinds == ["thinking", "text", "tool_use"]
    signed = [data["delta"]["type"] for name, data in order if name == "content_block_delta" and data["index"] == 0]
    assert signed[-1] == "signature_delta", "the signature ends the thinking block"


def test_tokens_are_counted(server: Server) -> None:
    body = {"system": "Be brief.", "tools": [TOOL], "max_tokens": ...}
    counted = ask(server, path=COUNT, **body).json
    usage = ask(server, **body).json["usage"]
    assert counted == {"input_tokens": usage["input_tokens"]}
    assert ask(server, "x" * 3000, path=COUNT).json["input_tokens"] > 3000


def test_a_schema_for_the_output(server: Server) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": form, "effort": "max"}}, {"output_format": form}):
        assert ask(server, **fields).status == 200
        grammar = server.service.requests[-1].sampling.grammar
        assert grammar is not None
        assert json.loads(grammar.text) == {"type": "object"}


def test_hosted_tools_are_left_out_and_named_in_a_header(server: Server) -> None:
    tools = [TOOL, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]
    answer = ask(server, tools=tools, thinking={"type": "enabled", "budget_tokens": 1024}, service_tier="auto")
    assert answer.headers["X-Ignored-Fields"] == "thinking.budget_tokens, tools"
    assert "web_search" not in prompt_of(server)


def test_unknown_fields_and_the_headers_of_claude_code_are_accepted(server: Server) -> None:
    body = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "a", "x": 1}], "new": {"a": 1}}
    headers = {"anthropic_version": "2023-06-01", "anthropic_beta": "x", "x_api_key": "k"}
    assert server.send(f"{PATH}?beta=true", body, **headers).status == 200


# ---- errors


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": ...}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]},
        "messages[0].content[0].id",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t"}]}]},
        "messages[0].content[0].name",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": []}]}]},
        "messages[0].content[0].input",
    ),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"model": 5}, "model"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -7}, "max_tokens"),
    ({"temperature": "x"}, "temperature"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"stop_sequences": [1]}, "stop_sequences[0]"),
    ({"stream": 1}, "stream"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": 5}]}, "tools[0].name"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema"),
    ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": True}, "thinking"),
    ({"thinking": {"budget_tokens": 5}}, "thinking.type"),
    ({"metadata": 5}, "metadata"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"effort": 5}}, "output_config.effort"),
    ({"tools": [{"name": f"f{i}", "input_schema": {}} for i in range(1025)]}, "tools"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=[str(fields)[:60] for fields, _ in WRONG])
@pytest.mark.parametrize("path", [PATH, COUNT])
def test_a_wrong_field_is_named_in_anthropics_shape(
    shared: Server, path: str, fields: dict[str, Any], param: str
) -> None:
    is_about_generation = param in ("max_tokens",) and fields["max_tokens"] == 0
    if path == COUNT and is_about_generation:
        return
    answer = ask(shared, path=path, **fields)
    assert answer.status == 400, answer.body
    assert answer.json["type"] == "error"
    assert answer.json["request_id"] == answer.headers["X-Request-Id"] == answer.headers["request-id"]
    error = answer.json["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"]


HOSTILE = [
    b"",
    b"[]",
    b"{",
    b"\xff",
    b'{"messages":' + b"[" * 100_000,
    b'{"x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
]
HOSTILE += [
    b'{"messages":[{"role":"user","content":'
    + b'[{"type":"tool_result","tool_use_id":"x","content":' * 5000
    + b'"a"'
    + b"}]" * 5000
    + b"}]}"
]


@pytest.mark.parametrize("body", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_bodies_are_refused_in_anthropics_shape(shared: Server, body: bytes) -> None:
    for path in (PATH, COUNT):
        answer = shared.send(path, body)
        assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_very_many_messages_of_one_role_take_linear_time(server: Server, role: str) -> None:
    messages = [{"role": role, "content": "x" * 40}] * 200_000 + [{"role": "user", "content": "a"}]
    answer = ask(server, messages=messages)
    assert (answer.status, answer.json["error"]["code"]) == (400, "context_length_exceeded")


def test_other_errors_have_anthropics_types(server: Server) -> None:
    assert ask(server, model="claude-x").json["error"]["type"] == "not_found_error"
    assert server.send(PATH).json["error"]["type"] == "invalid_request_error"
    server.say(overloaded=True)
    busy = ask(server)
    assert (busy.status, busy.json["error"]["type"]) == (503, "overloaded_error")
    server.say("abc", dies_after=2)
    events = ask(server, stream=True).events
    assert events[-1].event == "error"
    assert json.loads(events[-1].data)["error"]["type"] == "overloaded_error"


# ---- resuming


@pytest.mark.parametrize("text", [CALLING, "Hello, wörld 🙂", "<think>well</think>Hi", ""])
def test_a_stream_continues_after_any_event(start_server: Callable[..., Server], text: str) -> None:
    server = start_server(template=THINKING_TEMPLATE if "<think>" in text else None)
    server.say(text, cached_tokens=16, chunk_tokens=3)
    headers = {"x_stoker_stream": "1", "x_request_id": "r1"}
    body = {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": "a"}], "stream": True}
    body |= {"tools": [TOOL]} if text == CALLING else {}
    body |= {"thinking": {"type": "adaptive"}, "seed": 5}
    whole = server.send(PATH, body, **headers)
    events = whole.events
    created = int(whole.body.split(b":u ")[1].split()[2])
    token_ids: list[int] = []
    num_events, is_finished = 0, False
    for block in whole.body.split(b"\n\n")[:-1]:
        for line in block.split(b"\n"):
            if line.startswith(b":t "):
                token_ids += map(int, line.split()[2:])
            is_finished = is_finished or line.startswith(b":f ")
        num_events += b"data:" in block
        if not num_events:
            continue
        choice = {"token_ids": token_ids, "finished": is_finished}
        resume = {"created": created, "choices": [choice], "events": num_events}
        rest = server.send(PATH, body | {"resume": resume}, **headers)
        assert rest.status == 200, rest.body
        assert [comparable(event) for event in rest.events] == [comparable(event) for event in events[num_events:]]


def comparable(event: Any) -> Any:
    """Leave out the cached tokens: each worker reports its own, and a gateway corrects them."""
    data = json.loads(event.data)
    for name in ("input_tokens", "cache_read_input_tokens"):
        data.get("usage", {}).pop(name, None)
    return data

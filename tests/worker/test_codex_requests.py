"""What Codex and other agents send to `/v1/responses`: custom and namespace tools, their items, reasoning, metadata."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from http_server import Server

RESPONSES = "/v1/responses"
PATCH = '*** Begin Patch\n*** Add File: a.txt\n+h\u00e9llo "\\" \U0001f600\n*** End Patch\n'
CUSTOM = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}
NAMESPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {}}}],
}
SHELL = {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}, "strict": False}
TOOLS: list[Any] = [SHELL, CUSTOM, NAMESPACE, {"type": "web_search", "external_web_access": False}]
CODEX: dict[str, Any] = {
    "model": "tiny",
    "instructions": "You are a coding agent.",
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]}],
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "thread-1",
    "client_metadata": {"x-codex-installation-id": "1"},
    "text": {"verbosity": "medium"},
}


def call_text(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def prompt_of(server: Server) -> str:
    return server.text.tokenizer.decode(server.service.requests[-1].token_ids)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 1000])
def test_the_input_of_a_custom_tool_is_streamed_as_text(server: Server, chunk_tokens: int) -> None:
    server.say(call_text("apply_patch", {"input": PATCH}), chunk_tokens=chunk_tokens)
    answer = server.send(RESPONSES, CODEX)
    assert answer.headers["X-Ignored-Fields"] == "tools"  # the web search
    events = [json.loads(event.data) for event in answer.events]
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == PATCH
    [done] = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert done["input"] == PATCH
    [item] = events[-1]["response"]["output"]
    assert (item["type"], item["name"], item["input"], item["status"]) == (
        "custom_tool_call",
        "apply_patch",
        PATCH,
        "completed",
    )
    assert not {"arguments", "namespace"} & set(item)
    assert [tool["type"] for tool in events[-1]["response"]["tools"]] == ["function", "custom", "namespace"]
    assert server.context.unknown_fields.counts == {}


def test_the_official_client_reads_custom_and_namespace_calls(server: Server) -> None:
    client = server.client(_strict_response_validation=True)
    server.say(call_text("apply_patch", {"input": PATCH}) + "\n" + call_text("agents__spawn", {}))
    tools: Any = TOOLS[:3]
    answer = client.responses.create(model="tiny", input="Fix it.", tools=tools)
    custom, function = answer.output
    assert (custom.type, custom.input) == ("custom_tool_call", PATCH)
    assert (function.type, function.name, function.namespace) == ("function_call", "spawn", "agents")
    with client.responses.stream(model="tiny", input="Fix it.", tools=tools) as stream:
        assert [item.type for item in stream.get_final_response().output] == ["custom_tool_call", "function_call"]


def test_items_that_are_sent_back_read_as_the_model_wrote_them(server: Server) -> None:
    server.say("Done.")
    body = CODEX | {
        "stream": False,
        "input": [
            *CODEX["input"],
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": PATCH},
            {"type": "function_call", "call_id": "c2", "name": "spawn", "namespace": "agents", "arguments": "{}"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "patched"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "spawned"}]},
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        ],
    }
    answer = server.send(RESPONSES, body)
    assert answer.status == 200, answer.body
    prompt = prompt_of(server)
    written = json.dumps({"input": PATCH}, ensure_ascii=False)
    assert written in prompt
    assert '"name": "agents__spawn"' in prompt
    assert "patched" in prompt
    assert "spawned" in prompt
    assert 'start: \\"*** Begin Patch\\"' in prompt or 'start: "*** Begin Patch"' in prompt  # the grammar is shown


def test_tools_may_come_with_an_item_of_the_input(server: Server) -> None:
    server.say(call_text("agents__spawn", {}))
    item = {"type": "additional_tools", "role": "developer", "tools": [NAMESPACE, {"type": "web_search"}]}
    answer = server.send(RESPONSES, {"input": [item, *CODEX["input"]]})
    [call] = answer.json["output"]
    assert (call["name"], call["namespace"]) == ("spawn", "agents")


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "name": "apply_patch"},
        {"type": "function", "name": "spawn", "namespace": "agents"},
        {"type": "function", "name": "spawn"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]},
    ],
)
def test_a_chosen_tool_is_forced(server: Server, choice: Any) -> None:
    server.say(call_text("apply_patch", {"input": "x"}))
    assert server.send(RESPONSES, CODEX | {"tool_choice": choice, "stream": False}).status == 200
    grammar = server.service.requests[-1].sampling.grammar
    assert grammar is not None
    names = {"apply_patch", "agents__spawn", "shell"}
    assert len([name for name in names if name in grammar.text]) == 1


def test_reasoning_makes_the_round_trip_in_encrypted_content(start_server: Callable[..., Server]) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{{ tools }}<tool_call><think></think>"
    server = start_server(template=template)
    server.say("<think>I must look first.</think>\n" + call_text("shell", {}))
    answer = server.send(RESPONSES, CODEX | {"stream": False})
    reasoning, call = answer.json["output"]
    assert reasoning["content"][0]["text"] == "I must look first."
    del reasoning["content"]  # Codex sends back only the summary and the encrypted content
    back = [reasoning, call, {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}]
    server.say("Done.")
    kept = _template_messages(server, [*CODEX["input"], *back])
    assert kept[2]["reasoning_content"] == "I must look first."
    for content in (
        "gAAAAB-of-another-server",
        "stoker-reasoning-1:é",
        "stoker-reasoning-1:/w==",
        "stoker-reasoning-1:a",
    ):
        foreign = {**reasoning, "encrypted_content": content}
        kept = _template_messages(server, [*CODEX["input"], foreign, *back[1:]])
        assert "reasoning_content" not in kept[2]


@pytest.mark.parametrize(("arguments", "kept"), [('{"a": 1}', '{"a": 1}'), ({"a": 1}, {"a": 1}), (None, "")])
def test_the_arguments_of_an_earlier_call_are_kept(
    start_server: Callable[..., Server], arguments: object, kept: object
) -> None:
    server = start_server()
    server.say("Done.")
    call = {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": arguments}
    output = {"type": "function_call_output", "call_id": "c1", "output": "ok"}
    messages = _template_messages(server, [*CODEX["input"], call, output])
    assert messages[-2]["tool_calls"][0]["function"]["arguments"] == kept


def _template_messages(server: Server, items: list[Any]) -> list[dict[str, Any]]:
    from stoker.proto.openai.decode import decode
    from stoker.proto.openai.responses import ResponsesRequest
    from stoker.text.response_items import input_messages

    body = decode(ResponsesRequest, json.dumps(CODEX | {"input": items}).encode())
    assert server.send(RESPONSES, CODEX | {"input": items, "stream": False}).status == 200
    return input_messages(body)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{**CUSTOM, "format": {"type": "grammar", "syntax": "peg"}}]}, "tools[0].format"),
        ({"tools": [{**NAMESPACE, "name": None}]}, "tools[0].name"),
        ({"tools": [NAMESPACE, {**SHELL, "name": "agents__spawn"}]}, "tools[1].name"),
        ({"tools": [{**NAMESPACE, "tools": [{"type": "function", "name": "a b"}]}]}, "tools[0].tools[0].name"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "x"}]}, "input[0].input"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "x", "input": 5}]}, "input[0].input"),
        ({"input": [{"type": "custom_tool_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "invented_item"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "additional_tools", "tools": [{"name": "x"}]}]}, "input[0].tools[0].type"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
    ],
)
def test_what_cannot_be_understood_is_refused_with_its_field(server: Server, change: Any, param: str) -> None:
    answer = server.send(RESPONSES, CODEX | change)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body


def test_truncation_drops_the_oldest_turns_and_keeps_the_system_prompt(server: Server) -> None:
    turns: list[Any] = []
    for i in range(40):
        turns += [{"role": "user", "content": f"question {i} " + "x" * 60}, {"role": "assistant", "content": f"a{i}"}]
    turns.append({"role": "user", "content": "the last one"})
    body = {"instructions": "Keep me.", "input": turns, "max_output_tokens": 5}
    assert server.send(RESPONSES, body).error["code"] == "context_length_exceeded"
    answer = server.send(RESPONSES, body | {"truncation": "auto"})
    assert answer.status == 200, answer.body
    assert answer.json["truncation"] == "auto"
    assert "X-Ignored-Fields" not in answer.headers
    prompt = prompt_of(server)
    assert "Keep me." in prompt
    assert "the last one" in prompt
    assert "question 0 " not in prompt
    kept = [i for i in range(40) if f"question {i} " in prompt]
    assert kept == list(range(kept[0], 40)), "only the oldest turns are dropped"
    room = server.context.limits.max_model_tokens - 5 - len(server.service.requests[-1].token_ids)
    assert room < 150, "another turn would have fitted"
    too_long = server.send(RESPONSES, body | {"truncation": "auto", "input": "y" * 5000})
    assert too_long.error["code"] == "context_length_exceeded"

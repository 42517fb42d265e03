"""Prompts follow the model's own template; ours replaces it for tools that it does not support; errors are the client's."""

from __future__ import annotations

import gzip
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken

from stoker.base.errors import InvalidRequest, ModelFilesError
from stoker.proto.openai.chat import ChatRequest
from stoker.proto.openai.decode import decode
from stoker.text.conversation import chat_conversation, num_chars
from stoker.text.parsers.contract import TOOL_PARSERS, ToolArgumentsDelta, ToolCallStart
from stoker.text.template import ChatTemplate
from stoker.text.tokenizer import Tokenizer
from stoker.text.tools import chat_tools

DATA = Path(__file__).parents[2].parent / "shared" / "data"
SMOL = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OWN_TOOLS = (
    "{% for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}{% endfor %};{% endfor %}"
)
TOOL = {
    "type": "function",
    "function": {"name": "search", "description": "Finds „it“", "parameters": {"type": "object"}},
}
ARGUMENTS = '{"query":"Zürich",  "days":3}'
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": ARGUMENTS}},
            {"id": "call_2", "type": "function", "function": {"name": "search", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "rain"}]},
]


def _template(source: str | None, tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate({} if source is None else {"default": source}, tokenizer)


def test_a_models_own_template(tokenizer: Tokenizer) -> None:
    template = _template(SMOL, tokenizer)
    assert template.render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.render([{"role": "system", "content": "S"}], add_generation_prompt=False) == (
        "<|im_start|>system\nS<|im_end|>\n"
    )


def test_without_a_template_chatml_is_used(tokenizer: Tokenizer, tmp_path: Path) -> None:
    template = ChatTemplate.from_folder(tmp_path, tokenizer)
    assert template.render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "<tools>" in template.render([{"role": "user", "content": "Hi"}], [TOOL])


def test_our_tool_template_replaces_one_without_tools(tokenizer: Tokenizer) -> None:
    template = _template(SMOL, tokenizer)
    assert template.tool_format == "hermes"
    prompt = template.render(HISTORY, [TOOL])
    assert prompt.startswith("<|im_start|>system\nBe kind.\n\n")
    assert "<tools>\n" + json.dumps(TOOL, ensure_ascii=False) + "\n</tools>" in prompt
    calls = f'<tool_call>\n{{"name": "search", "arguments": {ARGUMENTS}}}\n</tool_call>'
    empty = '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'
    assert prompt.endswith(
        f"<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n{calls}\n{empty}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert "<tools>" not in template.render(HISTORY)
    assert template.render(HISTORY).count("<tool_response>") == 2
    assert template.render([{"role": "system", "content": "S"}, *HISTORY], [TOOL]).startswith(
        "<|im_start|>system\nS\n\n"
    )


def test_a_resent_call_is_the_text_that_was_sampled(tokenizer: Tokenizer) -> None:
    template = _template(SMOL, tokenizer)
    sampled = f'I look.\n<tool_call>\n{{"name": "search", "arguments": {ARGUMENTS}}}\n</tool_call>'
    parser = TOOL_PARSERS.get("hermes")([TOOL])
    deltas = parser.push(sampled) + parser.flush()
    name = next(delta.name for delta in deltas if isinstance(delta, ToolCallStart))
    arguments = "".join(delta.text for delta in deltas if isinstance(delta, ToolArgumentsDelta))
    call = {"id": "x", "type": "function", "function": {"name": name, "arguments": arguments}}
    history = [{"role": "user", "content": "?"}]
    answer = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    resent = template.render([*history, answer], [TOOL], add_generation_prompt=False)
    assert resent == template.render(history, [TOOL]) + sampled + "<|im_end|>\n"


@pytest.mark.parametrize(
    ("sent", "written"),
    [
        (
            '{"query":"Zürich: [a,b]","days":[1,2],"deep":{"x":null}}',
            '{"query": "Zürich: [a,b]", "days": [1, 2], "deep": {"x": null}}',
        ),
        ('{"query": "a","days":3}', '{"query": "a","days":3}'),
        ('{"n":1.0,"m":1e5}', '{"n":1.0,"m":1e5}'),  # numbers would change
        ('{"query":"a"', '{"query":"a"'),
        ("[" * 100_000 + '"":', "[" * 100_000 + '"":'),
    ],
)
def test_compact_arguments_get_the_white_space_that_models_write(sent: str, written: str, tokenizer: Tokenizer) -> None:
    """JavaScript clients send arguments back compactly."""
    call = {"id": "x", "type": "function", "function": {"name": "search", "arguments": sent}}
    prompt = _template(SMOL, tokenizer).render([{"role": "assistant", "content": "", "tool_calls": [call]}], [TOOL])
    assert f'"arguments": {written}}}\n</tool_call>' in prompt


def test_arguments_are_an_object_for_templates_that_serialize(tokenizer: Tokenizer) -> None:
    template = _template(OWN_TOOLS, tokenizer)
    assert '<tool_call>{"query": "Zürich", "days": 3}<tool_call>{}' in template.render(HISTORY, [TOOL])
    broken = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{nope"}}]}
    assert template.render([broken]) == 'assistant:<tool_call>"{nope";'


def test_half_a_surrogate_pair_from_a_model_does_not_end_the_conversation(tokenizer: Tokenizer) -> None:
    calls = [{"function": {"name": "f", "arguments": '{"a": "\\uD83D", "b": "\\ud83e\\udd8a"}'}}]
    rendered = _template(OWN_TOOLS, tokenizer).render([{"role": "assistant", "tool_calls": calls}])
    assert '{"a": "?", "b": "🦊"}' in rendered
    assert tokenizer.encode(rendered)


def test_arguments_are_text_for_templates_that_join_strings(tokenizer: Tokenizer) -> None:
    joins = (
        "{% for message in messages %}{% if message['content'] is none %}{% for tool in message['tool_calls'] %}"
        "{{ '<｜tool▁calls▁begin｜>' + tool['type'] + '```json' + tool['function']['arguments'] + '```' }}"
        "{% endfor %}{% else %}{{ message['content'] }}{% endif %}{% endfor %}{{ tools }}"
    )
    template = _template(joins, tokenizer)
    assert ARGUMENTS in template.render(HISTORY, [TOOL])
    assert template.tool_format == "deepseek_v3"
    as_objects = [{"function": {"name": "f", "arguments": {"a": "ü"}}}]
    assert '{"a": "ü"}' in template.render([{"role": "assistant", "content": "", "tool_calls": as_objects}], [TOOL])


def test_tools_are_refused_if_the_template_does_not_support_them(tokenizer: Tokenizer) -> None:
    template = _template("{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}", tokenizer)
    with pytest.raises(InvalidRequest, match="does not support tools") as refused:
        template.render([{"role": "user", "content": "x"}], [TOOL])
    assert refused.value.param == "tools"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"content": "a"}], "messages[0].role"),
        (["hello"], "messages[0]"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "tool_calls": {"id": "x"}}], "messages[0].tool_calls"),
    ],
)
def test_a_wrong_message_is_named(tokenizer: Tokenizer, messages: list[Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        _template(SMOL, tokenizer).render(messages)
    assert refused.value.param == param


def test_parts_are_joined_and_the_developer_role_becomes_system(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    prompt = _template(SMOL, tokenizer).render([{"role": "developer", "content": parts}])
    assert prompt.startswith("<|im_start|>system\na\nb<|im_end|>")


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 3 }}",
        "{{ messages[9].content.x }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_an_error_in_a_template_is_an_invalid_request(tokenizer: Tokenizer, source: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        _template(source, tokenizer).render([{"role": "user", "content": "x"}])
    assert refused.value.param == "messages"


def test_the_functions_that_templates_use_exist(tokenizer: Tokenizer) -> None:
    source = (
        "{{ bos_token }}{{ {'ü': [1, 2]} | tojson(indent=1, separators=(',', ':')) }}{{ strftime_now('%Y') }}"
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% if loop.first %}{% break %}{% endif %}"
        "{% endfor %}{% if enable_thinking is defined and not enable_thinking %}!{% endif %}"
    )
    messages = [{"role": "user", "content": "<x>"}, {"role": "user", "content": "y"}]
    prompt = _template(source, tokenizer).render(messages, enable_thinking=False)
    assert prompt == '{\n "ü":[\n  1,\n  2\n ]\n}' + time.strftime("%Y") + "<x>!"
    with pytest.raises(InvalidRequest):
        _template(source, tokenizer).render(messages, bos_token="x")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": "config"}}, ("config", None)),
        ({"chat_template.json": {"chat_template": "processor"}}, ("processor", None)),
        ({"tokenizer_config.json": {"chat_template": "config"}, "chat_template.jinja": "file"}, ("file", None)),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "default", "template": "plain"},
                        {"name": "tool_use", "template": "with {{ tools | length }}"},
                    ]
                }
            },
            ("plain", "with 1"),
        ),
    ],
)
def test_templates_are_found_in_all_files(
    tokenizer: Tokenizer, tmp_path: Path, files: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    template = ChatTemplate.from_folder(tmp_path, tokenizer)
    assert template.render([{"role": "user", "content": "x"}]) == expected[0]
    if expected[1] is not None:
        assert template.render([{"role": "user", "content": "x"}], [TOOL]) == expected[1]


def test_an_invalid_template_is_an_error_of_the_model_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ModelFilesError, match="line 1"):
        ChatTemplate.from_folder(tmp_path, tokenizer)


@pytest.mark.parametrize(
    ("source", "marks", "tool_format", "reasoning"),
    [
        ("{{ tools }}<|tool_calls_section_begin|>", [], "kimi_k2", None),
        ("{{ tools }}<｜tool▁calls▁begin｜>```json", [], "deepseek_v3", None),
        ("{{ tools }}<｜tool▁calls▁begin｜><think>", [], "deepseek_v31", "think"),
        ("{{ tools }}<tool_call><think>", [], "hermes", "think"),
        ("{{ tools }}<|start_header_id|>", ["<|python_tag|>"], "llama3_json", None),
        ("{{ tools }}", ["<|tool_calls_section_begin|>", "<think>"], "kimi_k2", "think"),
        ("{{ tools }}", [], "hermes", None),
    ],
)
def test_formats_are_detected(source: str, marks: list[str], tool_format: str, reasoning: str | None) -> None:
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.decoder = tokenizers.decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    template = _template(source, Tokenizer(raw))
    assert (template.tool_format, template.reasoning_format) == (tool_format, reasoning)
    assert template.tool_format in TOOL_PARSERS


def test_the_cost_of_rendering_is_linear_in_the_conversation(tokenizer: Tokenizer) -> None:
    template = _template(SMOL, tokenizer)

    def num_calls(num_messages: int) -> int:
        messages = [{"role": "user", "content": "word " * 500} for _ in range(num_messages)]
        events: list[str] = []
        sys.setprofile(lambda frame, event, argument: events.append(event))
        try:
            rendered = template.render(messages, [TOOL])
        finally:
            sys.setprofile(None)
        assert len(rendered) > 2000 * num_messages
        return len(events)

    num_calls(100)  # whatever is done once
    assert num_calls(200) < 2.2 * num_calls(100)


@pytest.mark.parametrize("where", ["content", "reasoning", "arguments", "tools"])
def test_a_long_prompt_is_recognized_before_it_is_rendered(where: str) -> None:
    texts = {name: "x" * (100_000 if name == where else 1) for name in ("content", "reasoning", "arguments", "tools")}
    call = {"id": "c", "function": {"name": "f", "arguments": json.dumps({"text": texts["arguments"]})}}
    said = {"role": "assistant", "content": texts["content"], "reasoning": texts["reasoning"], "tool_calls": [call]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"title": texts["tools"]}}}
    body = decode(ChatRequest, json.dumps({"messages": [said], "tools": [tool]}).encode())
    assert num_chars(chat_conversation(body, chat_tools(body, 8), constrained=False)) > 100_000


@pytest.mark.skipif(not DATA.is_dir(), reason="the public conversations are not here")
def test_real_tool_conversations_grow_by_their_new_turns(tokenizer: Tokenizer) -> None:
    template = _template(SMOL, tokenizer)
    tools = json.loads((DATA / "tools" / "tau_tools.json").read_text())["airline"]
    with gzip.open(DATA / "agentic" / "tau_airline_gpt4o.jsonl.gz", "rt") as lines:
        row = json.loads(next(lines))
    prompt = ""
    for end in range(2, len(row["messages"]) + 1):
        if row["messages"][end - 1]["role"] != "user":
            continue
        longer = template.render(row["messages"][:end], tools, add_generation_prompt=False)
        assert longer.startswith(prompt)
        prompt = longer

"""What single tool-call formats do beyond the contract. tests/conformance/test_parsers.py tests the contract itself."""

from __future__ import annotations

import pytest
from parsing import CALLS, SEARCH, joined, parse_calls

from stoker.text.parsers.contract import TOOL_PARSERS, ToolCallStart
from stoker.text.parsers.json_stream import CallObject


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"arguments": {"query": "x"}, "name": "search"}', '{"query": "x"}'),
        ('{"name": "search", "arguments": "{\\"query\\": \\"x\\"}"}', '{"query": "x"}'),
        ('{"name": "search", "arguments": "{\\"query\\": \\"\\ud83d\\"}"}', '{"query": "?"}'),
        ('{"name": "search", "arguments": null}', "{}"),
        ('{"name": "search"}', "{}"),
        ('{"name": "search", "arguments": {"a": 1}, "arguments": {"b": 2}, "name": "now"}', '{"a": 1}'),
        ('{"id": [1, {"a": 2}], "name": "search", "arguments": {}, "more": -1.5e3}', "{}"),
    ],
)
def test_objects_in_other_shapes(written: str, arguments: str) -> None:
    assert joined(parse_calls("hermes", list(f"<tool_call>{written}</tool_call>"))) == [("call", "search", arguments)]
    assert joined(parse_calls("llama3_json", list(written))) == [("call", "search", arguments)]


def test_a_call_without_a_closing_mark_is_read() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n'
    assert joined(parse_calls("hermes", list(call + call))) == [("call", "now", "{}")] * 2


def test_llama_calls_only_the_requests_tools() -> None:
    other = '{"name": "Bob", "parameters": {"age": 3}}'
    assert joined(parse_calls("llama3_json", list(other))) == [("text", other)]
    tagged = '<|python_tag|>{"name": "now", "parameters": {}}'
    assert joined(parse_calls("llama3_json", list("Well. " + tagged))) == [("text", "Well."), ("call", "now", "{}")]
    code = "<|python_tag|>print(1)"
    assert joined(parse_calls("llama3_json", list(code))) == [("text", code)]


@pytest.mark.parametrize(
    ("name", "beginning"),
    [
        ("hermes", '<tool_call>{"a": ['),
        ("llama3_json", '<|python_tag|>{"a": ['),
        ("llama3_json", '<|python_tag|>{"name": "now"}; {"a": ['),
        ("llama3_json", '<|python_tag|>{"name": "other", "a": ['),
    ],
)
def test_many_incomplete_calls_are_not_read_quadratically(
    name: str, beginning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed, feed = 0, CallObject.feed

    def counted(call: CallObject, text: str) -> int:
        nonlocal fed
        taken = feed(call, text)
        fed += taken
        return taken

    monkeypatch.setattr(CallObject, "feed", counted)
    chunks = ['{"a": [', *[beginning] * 2000]
    whole = joined(parse_calls(name, chunks))
    assert fed < 1_000_000
    assert joined(parse_calls(name, ["".join(chunks)])) == whole


def test_a_call_is_found_inside_text_that_looked_like_one() -> None:
    written = '<tool_call>{"a": [' * 20 + TOOL_PARSERS.get("hermes").render(CALLS[:1])
    assert joined(parse_calls("hermes", [written])) == [("text", '<tool_call>{"a": [' * 20), ("call", "search", SEARCH)]


def test_kimi_keeps_its_call_ids() -> None:
    deltas = parse_calls("kimi_k2", [TOOL_PARSERS.get("kimi_k2").render(CALLS)])
    assert [d.call_id for d in deltas if isinstance(d, ToolCallStart)] == ["functions.search:0", "functions.now:1"]


@pytest.mark.parametrize("properties", [["a"], "a", 1, {"a": ["string"]}, {"a": True}])
def test_a_schema_that_is_wrong_does_not_end_the_answer(properties: object) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    parser = TOOL_PARSERS.get("glm45")([{"type": "function", "function": function}])
    call = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>NaN</arg_value>\n</tool_call>"
    # NaN is not JSON, so it is text.
    assert joined([*parser.push(call), *parser.flush()]) == [("call", "f", '{"a": "NaN"}')]

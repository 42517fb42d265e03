"""Formats of model families as the models write them: channels of gpt-oss, tagged arguments of GLM and MiniMax, Llama 4."""

from __future__ import annotations

import json
from typing import Any

import pytest
from parsing import joined, parse_calls, random_chunks

from stoker.text.parsers.contract import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallStart,
    find_format,
)
from stoker.worker.output import AllowedCalls, ReasonedOutput

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"enum": ["C", "F"]},
                "places": {"type": "array"},
            },
        },
    },
}


def parsed(text: str, name: str, seed: int) -> tuple[str, str, list[tuple[str, str]]]:
    """Return the reasoning, the text and the calls of an answer, parsed as the worker does it, in random chunks."""
    calls_parser = AllowedCalls(TOOL_PARSERS.get(name)([WEATHER]), True, False, lambda i: f"call_{i}")
    output = ReasonedOutput(REASONING_PARSERS.get(name)(False), calls_parser)
    reasoning, content, calls = "", "", []
    for delta in [*(d for chunk in random_chunks(text, seed) for d in output.push(chunk)), *output.flush()]:
        match delta:
            case ReasoningDelta():
                reasoning += delta.text
            case TextDelta():
                content += delta.text
            case ToolCallStart():
                calls.append((delta.name, ""))
            case ToolArgumentsDelta():
                calls[-1] = (calls[-1][0], calls[-1][1] + delta.text)
    return reasoning, content, calls


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
ARGUMENTS = '{"city": "Rome <b>", "days": 3}'
CALL = [("weather", ARGUMENTS)]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (f"{ANALYSIS}<|channel|>final<|message|>Hi.<|return|>", ("Hm.", "Hi.", [])),
        (f"{ANALYSIS}<|channel|>final<|message|>Hi", ("Hm.", "Hi", [])),
        (
            f"{ANALYSIS}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
            ("Hm.", "", CALL),
        ),
        (f"{ANALYSIS}<|channel|>commentary to=functions.weather json<|message|>{ARGUMENTS}", ("Hm.", "", CALL)),
        (
            f"{ANALYSIS} to=functions.weather<|channel|>commentary<|message|>{ARGUMENTS}<|call|>",
            ("Hm.", "", CALL),
        ),
        (f"<|channel|>analysis to=functions.weather code<|message|>{ARGUMENTS}<|call|>", ("", "", CALL)),
        (
            f"{ANALYSIS}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary"
            f" to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
            ("Hm.", "I look.", CALL),
        ),
        ("<|channel|>analysis<|message|>Cut o", ("Cut o", "", [])),
        ("No channel at all", ("", "No channel at all", [])),
    ],
)
def test_channels_of_harmony(written: str, expected: Any) -> None:
    for seed in range(10):
        assert parsed(written, "harmony", seed) == expected


GLM = '<tool_call>weather{0}<arg_key>city</arg_key>{0}<arg_value>Rome "x"\nand </b></arg_value>{0}<arg_key>days</arg_key>{0}'
MINIMAX = '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome "x"\nand </b></parameter>\n'


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("glm45", GLM.format("\n") + "<arg_value>3</arg_value>\n</tool_call>"),
        ("glm45", GLM.format("") + "<arg_value>3</arg_value></tool_call>"),
        ("minimax_m2", MINIMAX + '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>'),
    ],
)
def test_text_parameters_are_text_and_others_are_json(name: str, written: str) -> None:
    for seed in range(10):
        ((kind, called, arguments),) = _weather_calls(name, written, seed)
        assert (kind, called) == ("call", "weather")
        assert json.loads(arguments) == {"city": 'Rome "x"\nand </b>', "days": 3}


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("days", "3", 3),
        ("days", "soon", "soon"),
        ("city", "3", "3"),
        ("city", "", ""),
        ("unit", "C", "C"),
        ("places", '["a", {"b": null}]', ["a", {"b": None}]),
        ("unknown", "true", True),
        ("unknown", "words", "words"),
    ],
)
def test_values_follow_the_schema(key: str, value: str, expected: Any) -> None:
    glm = f"<tool_call>weather\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    section = "<minimax:tool_call>\n{}\n</minimax:tool_call>"
    minimax = section.format(f'<invoke name="weather">\n<parameter name="{key}">{value}</parameter>\n</invoke>')
    for name, written in (("glm45", glm), ("minimax_m2", minimax)):
        ((_, _, arguments),) = _weather_calls(name, written, seed=1)
        assert json.loads(arguments) == {key: expected}


def _weather_calls(name: str, written: str, seed: int) -> list[tuple[str, ...]]:
    parser = TOOL_PARSERS.get(name)([WEATHER])
    deltas = [delta for chunk in random_chunks(written, seed) for delta in parser.push(chunk)]
    return joined([*deltas, *parser.flush()])


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("<|start|>assistant<|channel|>analysis<|message|> <|channel|>commentary to=functions.", "harmony", "harmony"),
        ("<|assistant|>\n<think></think> <tool_call>{name}\n<arg_key>{key}</arg_key>", "glm45", "think"),
        ("]~b]ai\n<think>\n <minimax:tool_call>\n<invoke name=", "minimax_m2", "think"),
        ("<|im_middle|><think></think> <|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2", "think"),
        ("<|header_start|>assistant<|header_end|> <|python_start|>", "llama4_json", None),
        ("<|header_start|>system [func_name1(params_name1=params_value1)]", "llama4_pythonic", None),
        ("<|start_header_id|>assistant<|end_header_id|> <|python_tag|>", "llama3_json", None),
    ],
)
def test_a_models_template_selects_its_formats(template: str, tools: str, reasoning: str | None) -> None:
    assert find_format(TOOL_PARSERS, template, ()) == tools
    assert find_format(REASONING_PARSERS, template, ()) == reasoning


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("[weather(city='Rome', days=3)]", {"city": "Rome", "days": 3}),
        (
            '[weather(city="a, b)]", places=["x", {"y": None}], unit=True)]',
            {"city": "a, b)]", "places": ["x", {"y": None}], "unit": True},
        ),
        ("<|python_start|>[weather(days=-1)]<|python_end|>", {"days": -1}),
        ("[weather(places=[true, null])]", {"places": [True, None]}),
        ("[weather()]", {}),
    ],
)
def test_python_literals_become_json(written: str, expected: Any) -> None:
    for seed in range(10):
        ((_, name, arguments),) = _weather_calls("llama4_pythonic", written, seed)
        assert (name, json.loads(arguments)) == ("weather", expected)


def test_a_list_that_is_not_a_call_is_text() -> None:
    for text in ("[1, 2]", "[other(a=1)]", "[weather]", "See [weather(days=1)]"):
        assert _weather_calls("llama4_pythonic", text, seed=3) == [("text", text)]


def test_calls_of_llama4_may_be_between_marks() -> None:
    call = '{"name": "search", "parameters": {"query": "x"}}'
    for written in (call, f"<|python_start|>{call}<|python_end|>", f"\n{call}"):
        calls = [part for part in joined(parse_calls("llama4_json", list(written))) if part[0] == "call"]
        assert calls == [("call", "search", '{"query": "x"}')]
    assert joined(parse_calls("llama4_json", [f"<|python_start|>{call}<|python_end|>"]))[-1][0] == "call"

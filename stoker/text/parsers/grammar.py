"""Build the grammars of tool calls, as structural tags. The marks of the formats are arguments.

A `Format` is a node of a structural tag. The parsers say what their calls look like; this module combines calls with free text
and with the format that the client wants.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stoker.sched.request import GrammarSpec, InputGrammar, TextGrammar

Format = dict[str, Any]

# Maximum consecutive white space. Without a limit, a model that is forced to write JSON may write spaces without end.
_WHITESPACE_CHARS = 16

# The patterns of our own formats. They are cheap to compile, which a client's pattern need not be (compile_cost.py).
NUMBER = "[0-9]+"
SPACE = r"[ \t\r\n]*"
NO_OBJECT = (
    r"[ \t\r\n]*([^ \t\r\n{<]|<[^|<])"  # the start of a text that begins neither with an object nor with a mark `<|`
)
STRING = r'([^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*'  # the content of a JSON string
NO_LIST = (
    r"[ \t\r\n]*([^ \t\r\n\[<]|<[^|<])"  # the start of a text that begins neither with a list nor with a mark `<|`
)
IDENTIFIER = "[A-Za-z_][A-Za-z0-9_]*"
OWN_PATTERNS = (NUMBER, SPACE, NO_OBJECT, STRING, NO_LIST, IDENTIFIER)


@dataclass(frozen=True, slots=True)
class InputMarks:
    """The texts around the input of a custom tool call. If a quote ends it, the input is a JSON string."""

    opening: str
    end: str
    after: str  # between the end and the text that ends the call


# How the arguments of calls are written: as JSON, or with a tag for each of them.
_STYLES = {
    "json": InputMarks('{"input": "', '"', "}"),
    "glm_xml": InputMarks("<arg_key>input</arg_key>\n<arg_value>", "</arg_value>", "\n"),
    "minimax_xml": InputMarks('<parameter name="input">', "</parameter>", "\n"),
}


def functions(tools: Sequence[dict[str, Any]], style: str = "json") -> list[tuple[str, Format]]:
    """Return the name of each tool and the format of its arguments: its schema, any object, or the input of a custom tool.

    A custom tool has its grammar beside the function, as `input_grammar`. `style` says how the arguments are written.
    """
    return [(tool["function"]["name"], _arguments(tool, style)) for tool in tools]


def _arguments(tool: dict[str, Any], style: str) -> Format:
    given = tool.get("input_grammar")
    if given is not None:
        return custom_input(given, _STYLES[style])
    return schema(tool["function"].get("parameters") or {"type": "object"}) | {"style": style}


def custom_input(given: TextGrammar, marks: InputMarks) -> Format:
    """Return the format of a custom tool's input, which must be in the tag of its call. The engine enforces the grammar."""
    text = sequence(regex(STRING), const(marks.end)) if marks.end == '"' else text_up_to(marks.end)
    content = sequence(const(marks.opening), text, *([const(marks.after)] if marks.after else []))
    return content | {"input_grammar": (marks, given)}


def schema(json_schema: dict[str, Any] | bool) -> Format:
    return {"type": "json_schema", "json_schema": json_schema, "max_whitespace_cnt": _WHITESPACE_CHARS}


def const(text: str) -> Format:
    return {"type": "const_string", "value": text}


def regex(own_pattern: str) -> Format:
    assert own_pattern in OWN_PATTERNS
    return {"type": "regex", "pattern": own_pattern}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Format) -> Format:
    return {"type": "or", "elements": list(elements)}


def optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def tag(begin: str, content: Format, *ends: str) -> Format:
    """Return the format of a content between marks. Each of `ends` may end it."""
    return {"type": "tag", "begin": begin, "content": content, "end": list(ends)}


def text_without(*excluded: str) -> Format:
    """Return the format of any text that does not contain `excluded`."""
    return {"type": "any_text", "excludes": list(excluded)}


def text_up_to(end: str) -> Format:
    """Return the format of any text that ends with the first `end`."""
    return tag("", {"type": "any_text"}, end)


def calls(tags: Sequence[Format], separator: str, parallel: bool) -> Format:
    """Return the format of one call or, with `parallel`, of one or more calls with a separator between them."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def triggered(marks: Sequence[str], tags: Sequence[Format], excluded: Sequence[str], parallel: bool) -> Format:
    """Return the format of any text in which a mark must be the start of one of the tags.

    Each tag begins with one of the marks. Without `parallel`, the output ends with the first tag. The text outside of tags does
    not contain `excluded`.
    """
    return {
        "type": "triggered_tags",
        "triggers": list(marks),
        "tags": list(tags),
        "excludes": list(excluded),
        "stop_after_first": not parallel,
    }


def text_then(mark: str, content: Format) -> Format:
    """Return the format of any text that ends there, or goes on with a mark and the content, which ends the output."""
    return {"type": "dispatch", "rules": [[mark, content]], "loop": False}


def structural_tag(content: Format, *, allows_text: bool = False) -> GrammarSpec:
    inputs: dict[InputGrammar, None] = {}
    spec = {"type": "structural_tag", "format": _without_inputs(content, "", inputs)}
    text = json.dumps(spec, ensure_ascii=False)
    return GrammarSpec("structural_tag", text, allows_text=allows_text, inputs=tuple(inputs))


def _without_inputs(node: Any, begin: str, inputs: dict[InputGrammar, None]) -> Any:
    """Return the format without the grammars of custom inputs, which go to `inputs`. `begin`: of the innermost tag."""
    if isinstance(node, list):
        return [_without_inputs(part, begin, inputs) for part in node]
    if not isinstance(node, dict) or node.get("type") == "json_schema":
        return node
    begin = node["begin"] if node.get("type") == "tag" else begin
    if "input_grammar" in node:
        marks, given = node["input_grammar"]
        inputs[InputGrammar(begin, marks.opening, marks.end, given)] = None
    return {name: _without_inputs(part, begin, inputs) for name, part in node.items() if name != "input_grammar"}


def format_of(spec: GrammarSpec) -> Format:
    """Return a grammar that a client gave as a part of a structural tag."""
    match spec.kind:
        case "json_object":
            return schema({"type": "object"})
        case "json_schema":
            return schema(json.loads(spec.text))
        case "regex":
            return {"type": "regex", "pattern": spec.text}
        case "ebnf":
            return {"type": "grammar", "grammar": spec.text}
        case "structural_tag":
            content: Format = json.loads(spec.text)["format"]
            return content

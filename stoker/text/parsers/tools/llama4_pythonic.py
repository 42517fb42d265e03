"""Tool calls of Llama 4 as a Python list: `[search(query="x", days=3), now()]`, often after `<|python_start|>`.

The list must start the answer or follow the mark, and its first function must be one of the request's tools. Other lists are
text. Values may be Python or JSON literals.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from stoker.text.parsers import grammar
from stoker.text.parsers.contract import TOOL_PARSERS, TemplateMark
from stoker.text.parsers.streaming import HEADER_CHARS, Step, StreamingToolParser

_SPACES = " \t\r\n"
_NAME = r"[A-Za-z_][\w.-]*"
_FIRST = re.compile(rf"\s*\[\s*(?P<name>{_NAME})\s*\(")
_MAY_BE_FIRST = re.compile(rf"\s*(\[\s*({_NAME}\s*)?)?")
_NEXT = re.compile(rf",\s*(?P<name>{_NAME})\s*\(")
_MAY_BE_NEXT = re.compile(rf"(,\s*({_NAME}\s*)?)?")
_KEY = re.compile(r"(?P<key>[A-Za-z_]\w*)\s*=\s*")
_MAY_BE_KEY = re.compile(r"([A-Za-z_]\w*\s*)?")
_INPUT = grammar.InputMarks('input="', '"', "")  # of a custom tool; a JSON string is a Python literal, too
_CLOSER = {"(": ")", "[": "]", "{": "}"}


@TOOL_PARSERS.register("llama4_pythonic")
class Llama4PythonicParser(StreamingToolParser):
    needs_special_tokens = True
    template_marks = (TemplateMark("<|header_start|>", priority=-1, template_text="func_name1("),)
    reads_calls_after_text = False  # after text, a call needs the mark
    openers = ("<|python_start|>",)
    section_ends = ("<|python_end|>",)

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        super().__init__(tools)
        self._names = frozenset(tool["function"]["name"] for tool in tools)
        self._step = self._at_beginning
        self._num_parameters = 0
        self._value = _LiteralEnd()

    def _begin_call(self) -> Step:
        return self._at_list

    def _at_beginning(self) -> bool:
        stripped = self._buffer.lstrip(_SPACES)
        if not stripped and not self._final:
            return False
        self._step = self._in_text
        if stripped.startswith("["):
            self._add_text(self._buffer[: len(self._buffer) - len(stripped)])
            self._buffer, self._opener, self._seen = stripped, "", ""
            self._step = self._at_list
        return True

    def _at_list(self) -> bool:
        head = self._buffer[:HEADER_CHARS]
        found = _FIRST.match(head)
        if found is None and not self._final and len(head) < HEADER_CHARS and _MAY_BE_FIRST.fullmatch(head):
            return False
        if found is None or found["name"] not in self._names:
            return self._not_a_call()
        return self._open_call(found)

    def _not_a_call(self) -> bool:
        if self._opener:
            return super()._not_a_call()
        # A list without a mark: emit its first character as text, or it would be taken for a call again.
        self._add_text(self._buffer[:1])
        self._buffer = self._buffer[1:]
        self._step = self._in_text
        return True

    def _open_call(self, found: re.Match[str]) -> bool:
        self._buffer = self._buffer[found.end() :]
        self._num_parameters = 0
        self._start(found["name"])
        self._step = self._at_parameter
        return True

    def _at_parameter(self) -> bool:
        self._buffer = self._buffer.lstrip(f"{_SPACES},")
        if self._buffer.startswith(")"):
            self._buffer = self._buffer[1:]
            self._emit_arguments("}" if self._num_parameters else "{}")
            self._step = self._after_call_end
            return True
        head = self._buffer[:HEADER_CHARS]
        found = _KEY.match(head)
        # White space after the equals sign may go on in the next chunk.
        is_open = len(head) < HEADER_CHARS and (found is None or found.end() == len(head))
        if is_open and not self._final and (found is not None or _MAY_BE_KEY.fullmatch(head)):
            return False
        if found is None:
            if not self._final or self._buffer:  # not a parameter: the call ends here, and the rest is text
                self._emit_arguments("}" if self._num_parameters else "{}")
            self._step = self._in_text
            return bool(self._buffer)
        self._buffer = self._buffer[found.end() :]
        self._emit_arguments(f"{', ' if self._num_parameters else '{'}{json.dumps(found['key'])}: ")
        self._num_parameters += 1
        self._value, self._step = _LiteralEnd(), self._in_value
        return True

    def _in_value(self) -> bool:
        end = self._value.find(self._buffer)
        if end is None and not self._final:
            return False
        value = self._buffer if end is None else self._buffer[:end]
        self._emit_arguments(_json_of(value) if end is not None else value)
        self._buffer = self._buffer[len(value) :]
        self._step = self._at_parameter if end is not None else self._in_text
        return end is not None

    def _after_call_end(self) -> bool:
        stripped = self._buffer.lstrip(_SPACES)
        head = stripped[:HEADER_CHARS]
        found = _NEXT.match(head)
        if found is None and not self._final and len(head) < HEADER_CHARS and _MAY_BE_NEXT.fullmatch(head):
            return False
        self._step = self._in_text
        if found is not None:
            self._buffer = stripped
            return self._open_call(found)
        if stripped.startswith("]"):
            self._buffer = stripped[1:]
        return bool(self._buffer)

    @classmethod
    def call_tags(cls, tools: list[dict[str, Any]]) -> list[grammar.Format]:
        return [grammar.tag(f"{tool['function']['name']}(", _parameters(tool), ")") for tool in tools]

    @classmethod
    def calls(cls, tools: list[dict[str, Any]], *, parallel: bool) -> grammar.Format:
        return grammar.tag("[", grammar.calls(cls.call_tags(tools), ", ", parallel), "]")

    @classmethod
    def text_and_calls(cls, tools: list[dict[str, Any]], *, parallel: bool) -> grammar.Format:
        """An answer that begins with a bracket is a list of calls."""
        calls = cls.calls(tools, parallel=parallel)
        mark, end = cls.openers[0], grammar.optional(grammar.const(cls.section_ends[0]))
        marked = grammar.sequence(calls, end)
        begins_with_calls = grammar.optional(grammar.either(calls, grammar.sequence(grammar.const(mark), marked)))
        return grammar.either(
            grammar.sequence(grammar.regex(grammar.SPACE), begins_with_calls),
            grammar.sequence(grammar.regex(grammar.NO_LIST), grammar.text_then(mark, marked)),
        )

    @classmethod
    def render(cls, calls: Sequence[tuple[str, str]]) -> str:
        written = []
        for name, arguments in calls:
            pairs = (f"{key}={_python_of(value)}" for key, value in json.loads(arguments).items())
            written.append(f"{name}({', '.join(pairs)})")
        return f"[{', '.join(written)}]"


class _LiteralEnd:
    """Finds the end of a value: a comma or a parenthesis outside of strings and brackets."""

    def __init__(self) -> None:
        self._at = 0
        self._closers: list[str] = []
        self._quote = ""
        self._escaped = False

    def find(self, text: str) -> int | None:
        """Return the index after the value, or None if it is not complete. `text` has grown since the last call."""
        while self._at < len(text):
            char = text[self._at]
            if self._quote:
                if not self._escaped and char == self._quote:
                    self._quote = ""
                self._escaped = char == "\\" and not self._escaped
            elif char in "\"'":
                self._quote = char
            elif char in _CLOSER:
                self._closers.append(_CLOSER[char])
            elif self._closers and char == self._closers[-1]:
                self._closers.pop()
            elif not self._closers and char in ",)":
                return self._at
            self._at += 1
        return None


def _json_of(value: str) -> str:
    """Return a Python or JSON literal as JSON. Anything else is text."""
    try:
        json.loads(value)
        return value.strip()
    except (ValueError, RecursionError):
        pass
    try:
        return json.dumps(ast.literal_eval(value.strip()), ensure_ascii=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return json.dumps(value.strip(), ensure_ascii=False)


def _python_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _parameters(tool: dict[str, Any]) -> grammar.Format:
    """Return the format of keyword arguments: the required ones first, then the optional ones in the schema's order."""
    if (custom := tool.get("input_grammar")) is not None:
        return grammar.custom_input(custom, _INPUT)
    schema = tool["function"].get("parameters")
    if schema is None:
        pair = grammar.sequence(grammar.regex(grammar.IDENTIFIER), grammar.const("="), grammar.schema(True))
        more = {"type": "star", "content": grammar.sequence(grammar.const(", "), pair)}
        return grammar.optional(grammar.sequence(pair, more))
    properties, definitions = (
        schema.get("properties") or {},
        {k: v for k, v in schema.items() if k in ("$defs", "definitions")},
    )
    required = [name for name in schema.get("required") or () if name in properties]
    others = [name for name in properties if name not in required]

    def pair_of(name: str, before: str) -> grammar.Format:
        value = properties[name]
        value = value | definitions if isinstance(value, dict) else value
        return grammar.sequence(grammar.const(f"{before}{name}="), grammar.schema(value))

    def rest_after(index: int) -> list[grammar.Format]:
        return [grammar.optional(pair_of(name, ", ")) for name in others[index:]]

    if required:
        first = [pair_of(name, ", " if i else "") for i, name in enumerate(required)]
        return grammar.sequence(*first, *rest_after(0))
    if not others:
        return grammar.const("")
    firsts = [grammar.sequence(pair_of(name, ""), *rest_after(i + 1)) for i, name in enumerate(others)]
    return grammar.optional(grammar.either(*firsts))

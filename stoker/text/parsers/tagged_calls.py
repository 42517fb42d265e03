"""Base class of the formats in which each argument of a call has a tag of its own: GLM, MiniMax.

The value of a text parameter is the text as it is. Other values are JSON. The tool's schema says which parameters are text.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

from stoker.text.parsers.streaming import HEADER_CHARS, Step, StreamingToolParser
from stoker.text.stops import open_chars


class TaggedCalls(StreamingToolParser):
    """A call is a header with the function's name, parameters with a name and a value each, and an end mark."""

    header: ClassVar[re.Pattern[str]]  # after the opening mark; the group `name`. It must not need the text after it
    parameter_mark: ClassVar[str]  # starts a parameter
    parameter: ClassVar[re.Pattern[str]]  # the whole start of a parameter, up to its value; the group `name`
    value_end: ClassVar[str]
    call_end: ClassVar[str]

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        super().__init__(tools)
        functions = [tool["function"] for tool in tools]
        self._schemas = {one["name"]: _properties(one.get("parameters") or {}) for one in functions}
        self._properties: dict[str, Any] = {}  # of the tool that is called
        self._num_parameters = 0
        self._is_text = False  # the value that is being read

    def _begin_call(self) -> Step:
        return self._in_header

    def _in_header(self) -> bool:
        found = self.header.match(self._buffer[:HEADER_CHARS])
        following = self._buffer[found.end() :] if found is not None else ""
        is_call = following.startswith((self.parameter_mark, self.call_end))
        if not is_call and not self._final and len(self._buffer) < HEADER_CHARS:
            return False
        if found is None or not is_call:
            return self._not_a_call()
        self._buffer = following
        self._properties = self._schemas.get(found["name"], {})
        self._num_parameters = 0
        self._start(found["name"])
        self._step = self._between_parameters
        return True

    def _between_parameters(self) -> bool:
        self._buffer = self._buffer.lstrip(" \t\r\n")
        if self._buffer.startswith(self.call_end):
            self._buffer = self._buffer[len(self.call_end) :]
            return self._end_call()
        found = self.parameter.match(self._buffer[:HEADER_CHARS])
        if found is not None:
            self._buffer = self._buffer[found.end() :]
            self._emit_arguments("{" if self._num_parameters == 0 else ", ")
            self._emit_arguments(f"{json.dumps(found['name'], ensure_ascii=False)}: ")
            self._num_parameters += 1
            self._is_text = _is_text(self._properties.get(found["name"]))
            if self._is_text:
                self._emit_arguments('"')
            self._step = self._in_value
            return True
        may_follow = self._buffer.startswith(self.parameter_mark) and len(self._buffer) < HEADER_CHARS
        marks = (self.parameter_mark, self.call_end)
        if not self._final and (may_follow or any(mark.startswith(self._buffer) for mark in marks)):
            return False
        if self._final and (may_follow or not self._buffer):
            self._buffer = ""  # cut off: the call keeps the arguments that it has
            return False
        return self._end_call()  # other text: the model forgot the end mark

    def _end_call(self) -> bool:
        self._emit_arguments("}" if self._num_parameters else "{}")
        self._step = self._in_text
        return True

    def _in_value(self) -> bool:
        end = self._buffer.find(self.value_end)
        if end < 0 and not self._is_text and not self._final:
            return False
        held = 0 if end >= 0 or self._final else open_chars(self._buffer, (self.value_end,))
        value = self._buffer[: end if end >= 0 else len(self._buffer) - held]
        self._buffer = self._buffer[len(value) :]
        if self._is_text:
            self._emit_arguments(json.dumps(value, ensure_ascii=False)[1:-1])
        else:
            self._emit_arguments(_json_of(value) if end >= 0 else value)
        if end < 0:
            return False
        self._buffer = self._buffer[len(self.value_end) :]
        if self._is_text:
            self._emit_arguments('"')
        self._step = self._between_parameters
        return True

    @classmethod
    def _values(cls, arguments: str) -> list[tuple[str, str]]:
        """Return the parameters of a call as the model writes them, for `render`."""
        given = json.loads(arguments)
        return [
            (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            for name, value in given.items()
        ]


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    given = schema.get("properties")
    return given if isinstance(given, dict) else {}  # a schema that is not enforced may be wrong


def _is_text(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return all(isinstance(value, str) for value in values)
    return schema.get("type") == "string"


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")  # Python reads NaN and Infinity, which no other client may


def _json_of(value: str) -> str:
    """Return a value as JSON. What is not JSON is text."""
    try:
        json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    return value.strip()

"""Tool calls of GLM-4.5: `<tool_call>`, the name, and the arguments as pairs of `<arg_key>` and `<arg_value>`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from stoker.text.parsers import grammar
from stoker.text.parsers.contract import TOOL_PARSERS, TemplateMark
from stoker.text.parsers.tagged_calls import TaggedCalls

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


@TOOL_PARSERS.register("glm45")
class Glm45Parser(TaggedCalls):
    needs_special_tokens = True
    template_marks = (TemplateMark("<arg_key>"),)
    openers = (_OPEN,)
    separator = "\n"
    header = re.compile(r"\s*(?P<name>[^\s<>{}]+)\s*(?=<)")
    parameter_mark = "<arg_key>"
    parameter = re.compile(r"<arg_key>\s*(?P<name>[^<]+?)\s*</arg_key>\s*<arg_value>")
    value_end = "</arg_value>"
    call_end = _CLOSE

    @classmethod
    def call_tags(cls, tools: list[dict[str, Any]]) -> list[grammar.Format]:
        return [
            grammar.tag(f"{_OPEN}{name}\n", arguments, _CLOSE)
            for name, arguments in grammar.functions(tools, style="glm_xml")
        ]

    @classmethod
    def render(cls, calls: Sequence[tuple[str, str]]) -> str:
        written = []
        for name, arguments in calls:
            pairs = (
                f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in cls._values(arguments)
            )
            written.append(f"{_OPEN}{name}\n{''.join(pairs)}{_CLOSE}")
        return "\n".join(written)

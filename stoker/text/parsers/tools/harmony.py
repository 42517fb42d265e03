"""Tool calls of gpt-oss (harmony): a message to `functions.NAME` on the commentary channel, with the arguments as JSON.

The reasoning parser of the same name takes the channels apart, and passes calls on in the form that is read here. `<|call|>` is a
stop token, so that the text of a real answer ends before it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from stoker.text.parsers import grammar
from stoker.text.parsers.contract import TOOL_PARSERS, TemplateMark
from stoker.text.parsers.streaming import HEADER_CHARS, HeaderCalls

_TO_FUNCTION = "<|channel|>commentary to=functions."
_MESSAGE = "<|message|>"
_NEXT = "<|start|>assistant"
_HEADER = re.compile(r"(?P<name>[^\s<]+)\s*(?:<\|constrain\|>\s*\w+|json)?\s*<\|message\|>")


@TOOL_PARSERS.register("harmony")
class HarmonyToolParser(HeaderCalls):
    needs_special_tokens = True
    template_marks = (TemplateMark("<|channel|>commentary"),)
    openers = (_TO_FUNCTION,)
    section_ends = (_NEXT,)
    call_end = "<|call|>"
    separator = _NEXT
    not_in_text = ("assistant to=", "analysis to=")  # other ways to address a function

    def _read_header(self) -> tuple[int, str, str | None] | None:
        head = self._buffer[:HEADER_CHARS]
        end = head.find(_MESSAGE)
        if end < 0:
            return None if len(self._buffer) < HEADER_CHARS else (0, "", None)
        found = _HEADER.match(head)
        return (found.end(), found["name"], None) if found is not None else (0, "", None)

    @classmethod
    def call_tags(cls, tools: list[dict[str, Any]]) -> list[grammar.Format]:
        return [
            grammar.tag(f"{_TO_FUNCTION}{name} <|constrain|>json{_MESSAGE}", arguments, cls.call_end, "")
            for name, arguments in grammar.functions(tools)
        ]

    @classmethod
    def render(cls, calls: Sequence[tuple[str, str]]) -> str:
        return _NEXT.join(
            f"{_TO_FUNCTION}{name} <|constrain|>json{_MESSAGE}{arguments}<|call|>" for name, arguments in calls
        )

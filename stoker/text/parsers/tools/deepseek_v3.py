"""Tool calls of DeepSeek. V3 and R1 write the arguments in a JSON code block, V3.1 without one.

One parser reads both. The two registered names differ only in the grammar that forces a call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from stoker.text.parsers import grammar
from stoker.text.parsers.contract import TOOL_PARSERS, TemplateMark
from stoker.text.parsers.streaming import HEADER_CHARS, HeaderCalls

_SECTION_BEGIN = "<｜tool▁calls▁begin｜>"
_SECTION_END = "<｜tool▁calls▁end｜>"
_CALL_BEGIN = "<｜tool▁call▁begin｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_FENCED_HEADER = re.compile(r"\s*(?P<name>[^\n{]*?)\s*```(?:json)?\s*(?=\{)")


@TOOL_PARSERS.register("deepseek_v3")
class DeepseekV3Parser(HeaderCalls):
    needs_special_tokens = True
    template_marks = (TemplateMark(_SECTION_BEGIN, priority=1, template_text="```json"),)
    openers = (_CALL_BEGIN,)
    section_begins = (_SECTION_BEGIN,)
    section_ends = (_SECTION_END,)
    call_end = _CALL_END
    separator = "\n"
    arguments_trim = " \t\r\n`"  # arguments end with a brace: backticks after it end the code block

    def _read_header(self) -> tuple[int, str, str | None] | None:
        head = self._buffer[:HEADER_CHARS]
        separator = head.find(_SEPARATOR)
        # The opening brace of the arguments ends the header. The text before it shows which of the two formats this is.
        brace = head.find("{", separator) if separator >= 0 else -1
        ended = _CALL_END in head[: brace if brace >= 0 else None]
        if ended or (brace < 0 and len(head) == HEADER_CHARS):
            return 0, "", None
        if brace < 0:
            return None
        after = separator + len(_SEPARATOR)
        if not head[after:brace].strip():
            return after, head[:separator].strip(), None
        fenced = _FENCED_HEADER.match(head, after)
        return (fenced.end(), fenced["name"], None) if fenced else (0, "", None)

    @classmethod
    def call_tags(cls, tools: list[dict[str, Any]]) -> list[grammar.Format]:
        return [
            grammar.tag(f"{_CALL_BEGIN}function{_SEPARATOR}{name}\n```json\n", arguments, f"\n```{_CALL_END}")
            for name, arguments in grammar.functions(tools)
        ]

    @classmethod
    def render(cls, calls: Sequence[tuple[str, str]]) -> str:
        written = (
            f"{_CALL_BEGIN}function{_SEPARATOR}{name}\n```json\n{arguments}\n```{_CALL_END}"
            for name, arguments in calls
        )
        return "".join((_SECTION_BEGIN, "\n".join(written), _SECTION_END))


@TOOL_PARSERS.register("deepseek_v31")
class DeepseekV31Parser(DeepseekV3Parser):
    template_marks = (TemplateMark(_SECTION_BEGIN),)
    separator = ""

    @classmethod
    def call_tags(cls, tools: list[dict[str, Any]]) -> list[grammar.Format]:
        return [
            grammar.tag(f"{_CALL_BEGIN}{name}{_SEPARATOR}", arguments, _CALL_END)
            for name, arguments in grammar.functions(tools)
        ]

    @classmethod
    def render(cls, calls: Sequence[tuple[str, str]]) -> str:
        written = (f"{_CALL_BEGIN}{name}{_SEPARATOR}{arguments}{_CALL_END}" for name, arguments in calls)
        return "".join((_SECTION_BEGIN, *written, _SECTION_END))

"""Tool calls of Kimi K2: a section of calls, each with an id `functions.NAME:NUMBER` before its arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from stoker.text.parsers import grammar
from stoker.text.parsers.contract import TOOL_PARSERS, TemplateMark
from stoker.text.parsers.streaming import HEADER_CHARS, HeaderCalls

_SECTION_BEGIN = "<|tool_calls_section_begin|>"
_SECTION_END = "<|tool_calls_section_end|>"
_CALL_BEGIN = "<|tool_call_begin|>"
_ARGUMENTS_BEGIN = "<|tool_call_argument_begin|>"
_CALL_END = "<|tool_call_end|>"
_CALL_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?", re.DOTALL)


@TOOL_PARSERS.register("kimi_k2")
class KimiK2Parser(HeaderCalls):
    needs_special_tokens = True
    template_marks = (TemplateMark(_SECTION_BEGIN),)
    openers = (_CALL_BEGIN,)
    section_begins = (_SECTION_BEGIN,)
    section_ends = (_SECTION_END,)
    call_end = _CALL_END

    def _read_header(self) -> tuple[int, str, str | None] | None:
        end = self._buffer.find(_ARGUMENTS_BEGIN, 0, HEADER_CHARS)
        if end < 0:
            return None if len(self._buffer) < HEADER_CHARS else (0, "", None)
        # The client gets the id unchanged, because the template prints it in later turns and the model relies on it.
        call_id = self._buffer[:end].strip()
        named = _CALL_ID.fullmatch(call_id)
        return end + len(_ARGUMENTS_BEGIN), named["name"] if named else "", call_id

    @classmethod
    def call_tags(cls, tools: list[dict[str, Any]]) -> list[grammar.Format]:
        number, begin = grammar.regex(grammar.NUMBER), grammar.const(_ARGUMENTS_BEGIN)
        return [
            grammar.tag(f"{_CALL_BEGIN}functions.{name}:", grammar.sequence(number, begin, arguments), _CALL_END)
            for name, arguments in grammar.functions(tools)
        ]

    @classmethod
    def render(cls, calls: Sequence[tuple[str, str]]) -> str:
        written = (
            f"{_CALL_BEGIN}functions.{name}:{number}{_ARGUMENTS_BEGIN}{arguments}{_CALL_END}"
            for number, (name, arguments) in enumerate(calls)
        )
        return f"{_SECTION_BEGIN}{''.join(written)}{_SECTION_END}"

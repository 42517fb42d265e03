"""Tool calls of MiniMax-M2: a section of `<invoke name="…">` elements with a `<parameter name="…">` for each argument."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from stoker.text.parsers import grammar
from stoker.text.parsers.contract import TOOL_PARSERS, TemplateMark
from stoker.text.parsers.tagged_calls import TaggedCalls

_SECTION_BEGIN = "<minimax:tool_call>"
_SECTION_END = "</minimax:tool_call>"


@TOOL_PARSERS.register("minimax_m2")
class MinimaxM2Parser(TaggedCalls):
    needs_special_tokens = True
    template_marks = (TemplateMark(_SECTION_BEGIN),)
    openers = ('<invoke name="',)
    section_begins = (_SECTION_BEGIN,)
    section_ends = (_SECTION_END,)
    section_gap = "\n"
    separator = "\n"
    header = re.compile(r'(?P<name>[^\s"<>]+)">\s*(?=<)')
    parameter_mark = '<parameter name="'
    parameter = re.compile(r'<parameter name="(?P<name>[^"<>]+)">')
    value_end = "</parameter>"
    call_end = "</invoke>"

    @classmethod
    def call_tags(cls, tools: list[dict[str, Any]]) -> list[grammar.Format]:
        return [
            grammar.tag(f'<invoke name="{name}">\n', arguments, "</invoke>")
            for name, arguments in grammar.functions(tools, style="minimax_xml")
        ]

    @classmethod
    def render(cls, calls: Sequence[tuple[str, str]]) -> str:
        written = []
        for name, arguments in calls:
            pairs = (f'<parameter name="{key}">{value}</parameter>\n' for key, value in cls._values(arguments))
            written.append(f'<invoke name="{name}">\n{"".join(pairs)}</invoke>')
        return "\n".join((_SECTION_BEGIN, *written, _SECTION_END))

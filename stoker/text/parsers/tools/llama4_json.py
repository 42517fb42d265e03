"""Tool calls of Llama 4: JSON objects as in Llama 3, often between `<|python_start|>` and `<|python_end|>`."""

from __future__ import annotations

from stoker.text.parsers.contract import TOOL_PARSERS, TemplateMark
from stoker.text.parsers.tools.llama3_json import Llama3JsonParser


@TOOL_PARSERS.register("llama4_json")
class Llama4JsonParser(Llama3JsonParser):
    template_marks = (TemplateMark("<|python_start|>", priority=-2), TemplateMark("<|header_start|>", priority=-2))
    openers = ("<|python_start|>",)
    section_ends = ("<|python_end|>",)

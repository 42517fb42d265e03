"""Tool calls of Llama 3: the answer consists of JSON objects with `name` and `parameters`, often after `<|python_tag|>`.

An answer can be JSON without being a call: only objects that name one of the request's tools are calls. Llama's calls of the code
interpreter are not supported and come out as text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from stoker.text.parsers import grammar
from stoker.text.parsers.contract import TOOL_PARSERS, TemplateMark
from stoker.text.parsers.streaming import ObjectCalls, Step

_PYTHON_TAG = "<|python_tag|>"
_SPACES = " \t\r\n"
_BETWEEN = f"{_SPACES};,"


@TOOL_PARSERS.register("llama3_json")
class Llama3JsonParser(ObjectCalls):
    needs_special_tokens = True
    # Models derived from Llama keep its tokens, but may write calls in another format: its mark then has precedence.
    template_marks = (TemplateMark(_PYTHON_TAG, priority=-2), TemplateMark("<|start_header_id|>", priority=-2))
    reads_calls_after_text = False  # after text, a call needs the mark
    openers = (_PYTHON_TAG,)
    separator = "; "

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        super().__init__(tools)
        self._names = frozenset(tool["function"]["name"] for tool in tools)
        self._step = self._at_beginning

    def _accepts(self, name: str) -> bool:
        return name in self._names

    def _end_object(self) -> Step:
        return self._after_object

    def _at_beginning(self) -> bool:
        stripped = self._buffer.lstrip(_SPACES)
        if not stripped and not self._final:
            return False
        self._step = self._in_text
        if stripped.startswith("{"):
            self._add_text(self._buffer[: len(self._buffer) - len(stripped)])
            self._buffer = stripped
            self._open_bare()
        return True

    def _after_object(self) -> bool:
        stripped = self._buffer.lstrip(_BETWEEN)
        if not stripped and not self._final:
            return False
        # If no other call follows, the separators are text.
        self._step = self._in_text
        mark = self.openers[0]
        if stripped.startswith(("{", mark)):
            self._buffer = stripped
            if stripped.startswith("{"):
                self._open_bare()
        elif not stripped:
            self._buffer = ""
        elif mark.startswith(stripped) and not self._final:
            self._step = self._after_object
            return False
        return True

    def _open_bare(self) -> None:
        self._opener, self._seen = "", ""
        self._step = self._begin_call()

    def _not_a_call(self) -> bool:
        if not self._opener:
            # An object without a mark: emit its first character as text, or it would be taken for a call again.
            text = self._seen + self._buffer
            self._add_text(text[:1])
            self._buffer, self._seen = text[1:], ""
            self._step = self._in_text
            return True
        return super()._not_a_call()

    @classmethod
    def call_tags(cls, tools: list[dict[str, Any]]) -> list[grammar.Format]:
        return [
            grammar.tag(f'{{"name": {json.dumps(name)}, "parameters": ', arguments, "}")
            for name, arguments in grammar.functions(tools)
        ]

    @classmethod
    def text_and_calls(cls, tools: list[dict[str, Any]], *, parallel: bool) -> grammar.Format:
        """An answer that begins with an object is a call, because its name may come last. So JSON needs a code block."""
        calls = cls.calls(tools, parallel=parallel)
        mark, end = cls.openers[0], [grammar.optional(grammar.const(mark)) for mark in cls.section_ends]
        marked = grammar.sequence(calls, *end)
        begins_with_calls = grammar.optional(grammar.either(calls, grammar.sequence(grammar.const(mark), marked)))
        return grammar.either(
            grammar.sequence(grammar.regex(grammar.SPACE), begins_with_calls),
            grammar.sequence(grammar.regex(grammar.NO_OBJECT), grammar.text_then(mark, marked)),
        )

    @classmethod
    def render(cls, calls: Sequence[tuple[str, str]]) -> str:
        return "; ".join(f'{{"name": {json.dumps(name)}, "parameters": {arguments}}}' for name, arguments in calls)

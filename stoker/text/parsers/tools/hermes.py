"""Tool calls of Hermes and Qwen: `<tool_call>` around a JSON object with `name` and `arguments`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from stoker.text.parsers import grammar
from stoker.text.parsers.contract import TOOL_PARSERS, TemplateMark
from stoker.text.parsers.streaming import ObjectCalls, Step

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


@TOOL_PARSERS.register("hermes")
class HermesParser(ObjectCalls):
    needs_special_tokens = False
    template_marks = (TemplateMark(_OPEN, priority=-1),)  # other formats with this mark have a further one of their own
    openers = (_OPEN,)
    separator = "\n"

    def _end_object(self) -> Step:
        return self._at_close

    def _at_close(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer.startswith(_CLOSE):
            self._buffer = self._buffer[len(_CLOSE) :]
        elif _CLOSE.startswith(self._buffer) and not self._final:
            return False
        # Models forget the closing mark before the next call or at the end. The object was complete, so that it counts as a call.
        self._step = self._in_text
        return True

    @classmethod
    def call_tags(cls, tools: list[dict[str, Any]]) -> list[grammar.Format]:
        return [
            grammar.tag(f'{_OPEN}\n{{"name": {json.dumps(name)}, "arguments": ', arguments, f"}}\n{_CLOSE}")
            for name, arguments in grammar.functions(tools)
        ]

    @classmethod
    def render(cls, calls: Sequence[tuple[str, str]]) -> str:
        return "\n".join(
            f'{_OPEN}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n{_CLOSE}' for name, arguments in calls
        )

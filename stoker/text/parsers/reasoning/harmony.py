"""The channels of gpt-oss (harmony): `analysis` is reasoning, `final` and `commentary` are text.

An answer is a series of messages: a header with the channel, `<|message|>`, the content, and a mark that ends the message. A
message to a function is a tool call: it is passed on as text, with a uniform header, for the tool parser of the same name.
"""

from __future__ import annotations

import re

from stoker.text.parsers import grammar
from stoker.text.parsers.contract import REASONING_PARSERS, ReasoningDelta, ReasoningParser, TemplateMark, TextDelta
from stoker.text.stops import open_chars

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_END = re.compile("|".join(re.escape(mark) for mark in _ENDS))
_ANALYSIS = f"{_CHANNEL}analysis{_MESSAGE}"
_FINAL = f"{_CHANNEL}final{_MESSAGE}"
_NEXT = "<|end|><|start|>assistant"
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


@REASONING_PARSERS.register("harmony")
class HarmonyReasoningParser(ReasoningParser):
    needs_special_tokens = True
    template_marks = (TemplateMark("<|channel|>analysis"),)
    frames_text = True

    def __init__(self, starts_inside: bool) -> None:
        self._buffer = ""
        self._part = "reasoning" if starts_inside else "beginning"  # then "header", "reasoning", "text" or "call"

    def push(self, text: str) -> list[ReasoningDelta | TextDelta]:
        self._buffer += text
        return self._run(final=False)

    def flush(self) -> list[ReasoningDelta | TextDelta]:
        return self._run(final=True)

    @classmethod
    def opened_by(cls, prompt: str) -> bool:
        return prompt.rstrip().endswith(_ANALYSIS)

    @classmethod
    def before(cls, answer: grammar.Format, starts_inside: bool) -> grammar.Format:
        framed = grammar.either(grammar.sequence(grammar.const(_FINAL), answer), answer)
        thought = grammar.either(
            grammar.sequence(grammar.text_up_to("<|end|>"), grammar.const("<|start|>assistant"), framed),
            grammar.text_without("<|end|>"),
        )
        return thought if starts_inside else grammar.either(grammar.sequence(grammar.const(_ANALYSIS), thought), framed)

    @classmethod
    def render(cls, reasoning: str, text: str) -> str:
        return f"{_ANALYSIS}{reasoning}{_NEXT}{_FINAL}{text}"

    def _run(self, final: bool) -> list[ReasoningDelta | TextDelta]:
        out: list[ReasoningDelta | TextDelta] = []
        while self._buffer and self._step(final, out):
            pass
        return out

    def _step(self, final: bool, out: list[ReasoningDelta | TextDelta]) -> bool:
        """Read one part of a message. Return False if more text is needed."""
        if self._part == "beginning":
            marks = (_START, _CHANNEL)
            if not final and any(mark.startswith(self._buffer) for mark in marks):
                return False
            self._part = "header" if self._buffer.startswith(marks) else "text"
            return True
        if self._part == "header":
            return self._read_header(final, out)
        return self._read_content(final, out)

    def _read_header(self, final: bool, out: list[ReasoningDelta | TextDelta]) -> bool:
        header, mark, rest = self._buffer.partition(_MESSAGE)
        if not mark:
            if final:
                self._buffer = ""  # cut off: it has no content
            return False
        self._buffer = rest
        recipient, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
        if recipient is not None:
            self._part = "call"
            out.append(TextDelta(f"{_CHANNEL}commentary to={recipient[1]} <|constrain|>json{_MESSAGE}"))
        else:
            self._part = "reasoning" if channel is not None and channel[1] == "analysis" else "text"
        return True

    def _read_content(self, final: bool, out: list[ReasoningDelta | TextDelta]) -> bool:
        found = _END.search(self._buffer)
        held = 0 if found is not None or final else open_chars(self._buffer, _ENDS)
        content = self._buffer[: found.start() if found is not None else len(self._buffer) - held]
        self._buffer = self._buffer[len(content) :]
        if content:
            out.append(ReasoningDelta(content) if self._part == "reasoning" else TextDelta(content))
        if found is None:
            return False
        if self._part == "call":
            out.append(TextDelta("<|call|>"))
        self._buffer = self._buffer[len(found.group()) :]
        self._part = "header"
        return True

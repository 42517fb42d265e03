"""Reasoning in `<think>…</think>` before the answer: DeepSeek R1, Qwen3, Kimi.

Only a block at the very start is reasoning. A later mark is part of the answer's text.
"""

from __future__ import annotations

from typing import ClassVar

from stoker.text.parsers import grammar
from stoker.text.parsers.contract import REASONING_PARSERS, ReasoningDelta, ReasoningParser, TemplateMark, TextDelta
from stoker.text.stops import open_chars


@REASONING_PARSERS.register("think")
class ThinkParser(ReasoningParser):
    """Splits off the reasoning. White space around the marks belongs to the format and is dropped.

    A format with other marks is a subclass with its own `template_marks`, `open_mark` and `close_mark`.
    """

    needs_special_tokens = False
    template_marks = (TemplateMark("<think>"),)
    open_mark: ClassVar[str] = "<think>"
    close_mark: ClassVar[str] = "</think>"

    def __init__(self, starts_inside: bool) -> None:
        self._buffer = ""
        self._starts_inside = starts_inside
        self._part = "beginning"  # then "reasoning", "gap" and "text"; or directly "text"
        self._trim = starts_inside  # drop white space at the start of the reasoning

    def push(self, text: str) -> list[ReasoningDelta | TextDelta]:
        self._buffer += text
        return self._run(final=False)

    def flush(self) -> list[ReasoningDelta | TextDelta]:
        return self._run(final=True)

    @classmethod
    def opened_by(cls, prompt: str) -> bool:
        return prompt.rstrip().endswith(cls.open_mark)

    @classmethod
    def before(cls, answer: grammar.Format, starts_inside: bool) -> grammar.Format:
        thought = grammar.sequence(grammar.text_up_to(cls.close_mark), grammar.regex(grammar.SPACE), answer)
        cut_off = grammar.text_without(cls.close_mark)
        if starts_inside:
            return grammar.either(thought, cut_off)
        opened = grammar.sequence(
            grammar.regex(grammar.SPACE), grammar.const(cls.open_mark), grammar.either(thought, cut_off)
        )
        return grammar.either(opened, answer)

    @classmethod
    def render(cls, reasoning: str, text: str) -> str:
        return f"{cls.open_mark}\n{reasoning}\n{cls.close_mark}\n\n{text}"

    def _run(self, final: bool) -> list[ReasoningDelta | TextDelta]:
        out: list[ReasoningDelta | TextDelta] = []
        if self._part == "beginning":
            self._begin(final)
        if self._part == "reasoning":
            reasoning = self._take_reasoning(final)
            if reasoning:
                out.append(ReasoningDelta(reasoning))
        if self._part == "gap":
            self._buffer = self._buffer.lstrip()
            self._part = "text" if self._buffer else "gap"
        if self._part == "text" and self._buffer:
            out.append(TextDelta(self._buffer))
            self._buffer = ""
        return out

    def _begin(self, final: bool) -> None:
        stripped = self._buffer.lstrip()
        if stripped.startswith(self.open_mark):
            # Some models write the opening mark although the prompt already ends with it.
            self._buffer = stripped[len(self.open_mark) :]
            self._part, self._trim = "reasoning", True
        elif not self.open_mark.startswith(stripped) or final:
            self._part = "reasoning" if self._starts_inside else "text"

    def _take_reasoning(self, final: bool) -> str:
        if self._trim:
            self._buffer = self._buffer.lstrip()
            self._trim = not self._buffer
        end = self._buffer.find(self.close_mark)
        if end >= 0:
            reasoning = self._buffer[:end].rstrip()
            self._buffer = self._buffer[end + len(self.close_mark) :]
            self._part = "gap"
            return reasoning
        held = 0 if final else open_chars(self._buffer, (self.close_mark,))
        open_part = self._buffer[: len(self._buffer) - held]
        reasoning = open_part if final else open_part.rstrip()
        self._buffer = self._buffer[len(reasoning) :]
        return reasoning

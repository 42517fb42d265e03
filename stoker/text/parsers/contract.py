"""The interfaces of tool parsers and reasoning parsers, and their registries.

Parsers get text as it is detokenized. They do not know HTTP, tokens or the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from stoker.base.registry import Registry
from stoker.text.parsers.grammar import Format


@dataclass(slots=True)  # not frozen: one is created per token, and creating a frozen one takes three times as long
class TextDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The start of a call, as soon as its function is known. Calls are numbered from 0."""

    index: int
    call_id: str  # written by the model; empty in formats without ids
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """More of a call's arguments. All deltas of a call, joined, are the JSON text that the model wrote."""

    index: int
    text: str


Delta: TypeAlias = TextDelta | ToolCallStart | ToolArgumentsDelta


@dataclass(frozen=True, slots=True)
class TemplateMark:
    """A text that shows that a model uses a format. It is searched in the chat templates, and then in the added tokens.

    If marks of several formats are found, the highest priority decides. Give a mark that other formats use too a priority below 0.
    """

    text: str
    priority: int = 0
    template_text: str = ""  # a further text that one of the chat templates must contain


class ToolParser(ABC):
    """Parses the tool calls of one answer. All text that is pushed comes out once, as text or as a part of a call.

    White space next to a call belongs to the format and is dropped. Text that only looked like the start of a call comes out as
    text. A call that has started (ToolCallStart) and is cut off keeps the arguments that it has.
    """

    needs_special_tokens: ClassVar[bool]  # its marks are special tokens, which the detokenizer must then not skip
    template_marks: ClassVar[
        tuple[TemplateMark, ...]
    ] = ()  # of models that use this format; none: only with --tool-format
    reads_calls_after_text: ClassVar[bool] = True  # False: calls as `render` writes them must start the answer

    @abstractmethod
    def __init__(self, tools: list[dict[str, Any]]) -> None: ...

    @abstractmethod
    def push(self, text: str) -> list[Delta]: ...

    @abstractmethod
    def flush(self) -> list[Delta]:
        """Return what was held back. Called when the answer has ended."""

    @classmethod
    @abstractmethod
    def calls(cls, tools: list[dict[str, Any]], *, parallel: bool) -> Format:
        """Return the format of one call to one of `tools` or, with `parallel`, of one or more calls, without other text."""

    @classmethod
    @abstractmethod
    def text_and_calls(cls, tools: list[dict[str, Any]], *, parallel: bool) -> Format:
        """Return the format of any answer in which every call is a valid call to one of `tools`.

        The text before a call is free. Everything that `push` would take for a call must be one that the format allows.
        """

    @classmethod
    @abstractmethod
    def render(cls, calls: Sequence[tuple[str, str]]) -> str:
        """Return calls (name, arguments as JSON text) as the model writes them. The conformance tests parse this text."""


class ReasoningParser(ABC):
    """Splits one answer into reasoning and text. `starts_inside`: the prompt ends with the mark that starts the reasoning."""

    needs_special_tokens: ClassVar[bool]
    template_marks: ClassVar[tuple[TemplateMark, ...]] = ()  # of models that use it; none: only with --reasoning-format
    # True if the text of an answer has marks of this format around it, too. Then every answer is parsed and constrained by it.
    frames_text: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, starts_inside: bool) -> None: ...

    @abstractmethod
    def push(self, text: str) -> list[ReasoningDelta | TextDelta]: ...

    @abstractmethod
    def flush(self) -> list[ReasoningDelta | TextDelta]: ...

    @classmethod
    @abstractmethod
    def opened_by(cls, prompt: str) -> bool:
        """Return True if the rendered prompt ends inside the reasoning, so that the answer starts there."""

    @classmethod
    @abstractmethod
    def before(cls, answer: Format, starts_inside: bool) -> Format:
        """Return the format of an answer that may begin with reasoning. The reasoning is free, and may be cut off.

        With `frames_text`, the result also has the marks around the answer.
        """

    @classmethod
    @abstractmethod
    def render(cls, reasoning: str, text: str) -> str:
        """Return reasoning and text as the model writes them. The conformance tests parse this text."""


TOOL_PARSERS: Registry[type[ToolParser]] = Registry("tool parser", "stoker.text.parsers.tools")
REASONING_PARSERS: Registry[type[ReasoningParser]] = Registry("reasoning parser", "stoker.text.parsers.reasoning")


def find_format(
    parsers: Registry[type[ToolParser]] | Registry[type[ReasoningParser]], templates: str, added_tokens: Collection[str]
) -> str | None:
    """Return the name of the parser whose marks a model has, or None if no parser fits."""
    marks = [(name, mark) for name in parsers for mark in parsers.get(name).template_marks]
    for searched in (templates, added_tokens):
        found = [
            (mark.priority, name) for name, mark in marks if mark.text in searched and mark.template_text in templates
        ]
        if found:
            return max(found)[1]
    return None

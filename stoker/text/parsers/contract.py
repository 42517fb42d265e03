"""What a parser takes and gives, and the registries in which parsers are found.

Parsers see text as it is detokenized. They refuse to know HTTP, tokens and which model wrote the text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from stoker.base.registry import Registry
from stoker.sched.request import GrammarSpec


@dataclass(slots=True)  # not frozen, though nobody changes it: one is made for every token, in a third of the time
class TextDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call whose function is known; calls are numbered from 0."""

    index: int
    call_id: str  # the model's own; empty in formats that have none
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """More of a call's arguments: all of them, joined, are the JSON text that the model wrote."""

    index: int
    text: str


Delta: TypeAlias = TextDelta | ToolCallStart | ToolArgumentsDelta


class ToolParser(ABC):
    """One answer's tool calls. What is pushed comes out once: as text, or as a call.

    White space that touches a call belongs to the format and is dropped. What began like a call and was none comes out
    as text; a call that has started (ToolCallStart) and breaks off keeps the arguments it has.
    """

    name: ClassVar[str]
    needs_special_tokens: ClassVar[bool]  # its marks are special tokens: the detokenizer must not skip them

    @abstractmethod
    def __init__(self, tools: list[dict[str, Any]]) -> None: ...

    @abstractmethod
    def push(self, text: str) -> list[Delta]: ...

    @abstractmethod
    def flush(self) -> list[Delta]:
        """The answer has ended: whatever was held back."""

    @classmethod
    @abstractmethod
    def grammar(cls, tools: list[dict[str, Any]], *, parallel: bool) -> GrammarSpec:
        """One call to one of `tools` and nothing else; with `parallel`, one or more."""


class ReasoningParser(ABC):
    """Splits one answer into reasoning and text. `starts_inside`: the prompt has already opened the reasoning."""

    name: ClassVar[str]
    needs_special_tokens: ClassVar[bool]

    @abstractmethod
    def __init__(self, starts_inside: bool) -> None: ...

    @abstractmethod
    def push(self, text: str) -> list[ReasoningDelta | TextDelta]: ...

    @abstractmethod
    def flush(self) -> list[ReasoningDelta | TextDelta]: ...

    @classmethod
    @abstractmethod
    def opened_by(cls, prompt: str) -> bool:
        """Whether this rendered prompt leaves the reasoning open, so that the answer starts inside it."""


TOOL_PARSERS: Registry[type[ToolParser]] = Registry("tool parser", "stoker.text.parsers.tools")
REASONING_PARSERS: Registry[type[ReasoningParser]] = Registry("reasoning parser", "stoker.text.parsers.reasoning")

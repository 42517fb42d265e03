"""Splits the text of an answer into reasoning, content and tool calls, by a reasoning parser and a tool parser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

from stoker.text.parsers.contract import Delta, ReasoningDelta, TextDelta, ToolCallStart

AnswerDelta: TypeAlias = Delta | ReasoningDelta


class OutputParser(Protocol):
    """Splits an answer's text, which arrives in pieces. `flush` returns what was held back."""

    def push(self, text: str) -> Sequence[AnswerDelta]: ...

    def flush(self) -> Sequence[AnswerDelta]: ...


class _ToolSide(Protocol):
    def push(self, text: str) -> list[Delta]: ...

    def flush(self) -> list[Delta]: ...


class _ReasoningSide(Protocol):
    def push(self, text: str) -> list[ReasoningDelta | TextDelta]: ...

    def flush(self) -> list[ReasoningDelta | TextDelta]: ...


class NoTools:
    """Returns everything as text."""

    def push(self, text: str) -> list[Delta]:
        return [TextDelta(text)]

    def flush(self) -> list[Delta]:
        return []


class AllowedCalls:
    """The output of a tool parser, with an id for each call, and without calls that the client does not allow.

    Without `parallel`, only the first call is kept. With `forced`, text is dropped: it can only be the rest of a call that
    was cut off.
    """

    def __init__(self, tools: _ToolSide, parallel: bool, forced: bool, call_id: Callable[[int], str]) -> None:
        self._tools = tools
        self._parallel = parallel
        self._forced = forced
        self._call_id = call_id

    def push(self, text: str) -> list[Delta]:
        return [self._with_id(delta) for delta in self._tools.push(text) if self._is_allowed(delta)]

    def flush(self) -> list[Delta]:
        return [self._with_id(delta) for delta in self._tools.flush() if self._is_allowed(delta)]

    def _with_id(self, delta: Delta) -> Delta:
        if isinstance(delta, ToolCallStart) and not delta.call_id:
            return replace(delta, call_id=self._call_id(delta.index))
        return delta

    def _is_allowed(self, delta: Delta) -> bool:
        if isinstance(delta, TextDelta):
            return not self._forced
        return self._parallel or delta.index == 0


class ReasonedOutput:
    """Splits off the reasoning first, and passes the rest to the tool parser."""

    def __init__(self, reasoning: _ReasoningSide, tools: _ToolSide) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def push(self, text: str) -> list[AnswerDelta]:
        return self._route(self._reasoning.push(text))

    def flush(self) -> list[AnswerDelta]:
        return [*self._route(self._reasoning.flush()), *self._tools.flush()]

    def _route(self, split: Sequence[ReasoningDelta | TextDelta]) -> list[AnswerDelta]:
        deltas: list[AnswerDelta] = []
        for delta in split:
            if isinstance(delta, ReasoningDelta):
                deltas.append(delta)
            else:
                deltas += self._tools.push(delta.text)
        return deltas

"""Tool calls in the chat format: the calls of one choice, of functions and of custom tools, as they arrive."""

from __future__ import annotations

from collections.abc import Container, Sequence

from msgspec import UNSET, UnsetType

from stoker.proto.openai.chat import CustomDelta, FunctionDelta, ToolCallDelta
from stoker.proto.openai.tools import CustomCall, FunctionCall, ToolCall
from stoker.text.custom_input import CustomInput
from stoker.text.parsers.contract import ToolArgumentsDelta, ToolCallStart


class ChatCalls:
    """Turns the calls of a choice into deltas. `custom` are the names of the custom tools."""

    def __init__(self, custom: Container[str]) -> None:
        self._custom = custom
        self._inputs: dict[int, CustomInput] = {}  # of calls of custom tools

    def push(self, deltas: Sequence[object], ended: bool) -> list[ToolCallDelta]:
        """Return the deltas of a piece of the answer. `ended`: it is the last one."""
        calls: list[ToolCallDelta] = []
        for delta in deltas:
            if isinstance(delta, ToolCallStart):
                calls.append(self._start(delta))
            elif isinstance(delta, ToolArgumentsDelta):
                self._add(calls, delta.index, delta.text)
        if ended:
            for index, held in self._inputs.items():
                _add_input(calls, index, held.flush())
        return calls

    def _start(self, start: ToolCallStart) -> ToolCallDelta:
        if start.name in self._custom:
            self._inputs[start.index] = CustomInput()
            custom = CustomDelta(name=start.name, input="")
            return ToolCallDelta(index=start.index, id=start.call_id, type="custom", custom=custom)
        function = FunctionDelta(name=start.name, arguments="")
        return ToolCallDelta(index=start.index, id=start.call_id, type="function", function=function)

    def _add(self, calls: list[ToolCallDelta], index: int, text: str) -> None:
        if index in self._inputs:
            _add_input(calls, index, self._inputs[index].push(text))
            return
        last = calls[-1] if calls else None
        if last is not None and last.index == index and not isinstance(last.function, UnsetType):
            last.function.arguments += text  # some clients read only the first entry of a chunk
            return
        calls.append(ToolCallDelta(index=index, function=FunctionDelta(arguments=text)))


def _add_input(calls: list[ToolCallDelta], index: int, text: str) -> None:
    if not text:
        return
    last = calls[-1] if calls else None
    if last is not None and last.index == index and not isinstance(last.custom, UnsetType):
        last.custom.input += text
        return
    calls.append(ToolCallDelta(index=index, custom=CustomDelta(input=text)))


def add_delta(calls: list[ToolCall], delta: ToolCallDelta) -> None:
    """Add a delta to the calls of a whole answer."""
    if not isinstance(delta.id, UnsetType):
        calls.append(_whole(delta.id, delta))
    elif not isinstance(delta.custom, UnsetType):
        custom = calls[delta.index].custom
        assert not isinstance(custom, UnsetType)
        custom.input += delta.custom.input
    elif not isinstance(delta.function, UnsetType):
        function = calls[delta.index].function
        assert not isinstance(function, UnsetType)
        function.arguments += delta.function.arguments


def _whole(call_id: str, delta: ToolCallDelta) -> ToolCall:
    if not isinstance(delta.custom, UnsetType):
        name = delta.custom.name or ""
        return ToolCall(id=call_id, type="custom", custom=CustomCall(name=name, input=delta.custom.input))
    function = delta.function
    assert not isinstance(function, UnsetType)
    return ToolCall(
        id=call_id, function=FunctionCall(name=function.name or "", arguments=function.arguments), custom=UNSET
    )

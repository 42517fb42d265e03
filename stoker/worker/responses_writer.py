"""Turns the pieces of an answer into the items and events of the Responses API. `responses.py` sends them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from stoker.proto.openai.answers import TokenLogprob, UsageReport
from stoker.proto.openai.responses import (
    IncompleteDetails,
    ResponseError,
    ResponseEvent,
    ResponseItem,
    ResponseObject,
    ResponsePart,
    ResponseStatus,
    ResponseUsage,
)
from stoker.text.custom_input import CustomInput
from stoker.text.parsers.contract import ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStart
from stoker.text.reasoning_items import encode_reasoning
from stoker.text.response_tools import CallableTool
from stoker.worker.generate import AnswerPiece
from stoker.worker.ids import AnswerIds
from stoker.worker.logprobs import TokenBytes, content_logprobs


class ResponseWriter:
    """Builds the response. Every call returns the events that describe the change.

    One item is open at a time. A delta of another kind, or of another call, closes it.
    """

    def __init__(
        self,
        response: ResponseObject,
        token_bytes: TokenBytes,
        ids: AnswerIds,
        tools: Mapping[str, CallableTool],
        *,
        encodes_reasoning: bool = False,
    ) -> None:
        """`tools` are those of the request, by the name that the model calls them.

        `encodes_reasoning`: reasoning items carry `encrypted_content`, which a stateless client sends back.
        """
        self.response = response
        self._token_bytes = token_bytes
        self._ids = ids
        self._tools = tools
        self._encodes_reasoning = encodes_reasoning
        self._custom_input = CustomInput()  # of the open custom tool call
        self._number = 0
        self._open: ResponseItem | None = None
        self._texts: list[str] = []  # of the open item
        self._logprobs: list[TokenLogprob] = []
        self._call_index = -1

    @property
    def started(self) -> bool:
        return self._number > 0

    def start(self) -> list[ResponseEvent]:
        """Return the events that begin the stream."""
        # A copy, because events are encoded later, when `output` may have grown.
        empty = msgspec.structs.replace(self.response, output=[])
        return [
            self._event("response.created", response=empty),
            self._event("response.in_progress", response=empty),
        ]

    def push(self, piece: AnswerPiece) -> list[ResponseEvent]:
        events: list[ResponseEvent] = []
        logprobs = content_logprobs(piece.logprobs, self._token_bytes)
        for delta in piece.deltas:
            match delta:
                case TextDelta():
                    events += self._text(delta.text, logprobs)
                    logprobs = []  # the entries of a chunk go with its first text
                case ReasoningDelta():
                    events += self._reasoning(delta.text)
                case ToolCallStart():
                    events += self._call(delta)
                case ToolArgumentsDelta() if delta.index == self._call_index:
                    events += self._arguments(delta.text)
        return events

    def finish(self, reason: Literal["stop", "length"], usage: UsageReport) -> list[ResponseEvent]:
        status: ResponseStatus = "incomplete" if reason == "length" else "completed"
        events = self._close(status)
        self.response.status = status
        self.response.usage = ResponseUsage.of(usage)
        if reason == "length":
            self.response.incomplete_details = IncompleteDetails("max_output_tokens")
        return [*events, self._event(f"response.{status}", response=self.response)]

    def fail(self, message: str) -> list[ResponseEvent]:
        self._close("incomplete")
        self.response.status = "failed"
        self.response.error = ResponseError("server_error", message)
        return [self._event("response.failed", response=self.response)]

    def _text(self, text: str, logprobs: list[TokenLogprob]) -> list[ResponseEvent]:
        events = []
        if self._open is None or self._open.type != "message":
            events = self._begin(ResponseItem(id=self._new_id("msg_"), type="message", role="assistant", content=[]))
            events.append(self._of_part("response.content_part.added", part=_output_text("", [])))
        self._texts.append(text)
        self._logprobs += logprobs
        events.append(self._of_part("response.output_text.delta", delta=text, logprobs=logprobs))
        return events

    def _reasoning(self, text: str) -> list[ResponseEvent]:
        events = []
        if self._open is None or self._open.type != "reasoning":
            events = self._begin(ResponseItem(id=self._new_id("rs_"), type="reasoning", summary=[], content=[]))
            part = ResponsePart(type="reasoning_text")
            events.append(self._of_part("response.content_part.added", part=part))
        self._texts.append(text)
        events.append(self._of_part("response.reasoning_text.delta", delta=text))
        return events

    def _call(self, start: ToolCallStart) -> list[ResponseEvent]:
        self._call_index = start.index
        tool = self._tools.get(start.name, CallableTool("function", start.name))
        named: dict[str, Any] = {"call_id": start.call_id, "name": tool.name, "namespace": tool.namespace or UNSET}
        if tool.kind == "function":
            return self._begin(ResponseItem(id=self._new_id("fc_"), type="function_call", arguments="", **named))
        self._custom_input = CustomInput()
        return self._begin(ResponseItem(id=self._new_id("ctc_"), type="custom_tool_call", input="", **named))

    def _arguments(self, text: str) -> list[ResponseEvent]:
        if self._open is not None and self._open.type == "custom_tool_call":
            return self._custom_delta(self._custom_input.push(text))
        self._texts.append(text)
        return [self._of_item("response.function_call_arguments.delta", delta=text)]

    def _custom_delta(self, text: str) -> list[ResponseEvent]:
        if not text:
            return []
        self._texts.append(text)
        return [self._of_item("response.custom_tool_call_input.delta", delta=text)]

    def _begin(self, item: ResponseItem) -> list[ResponseEvent]:
        events = self._close("completed")
        self._open = item
        self.response.output.append(item)
        events.append(self._event("response.output_item.added", output_index=self._index, item=copy.copy(item)))
        return events

    def _close(self, status: ResponseStatus) -> list[ResponseEvent]:
        item = self._open
        if item is None:
            return []
        events = self._custom_delta(self._custom_input.flush()) if item.type == "custom_tool_call" else []
        text = "".join(self._texts)
        match item.type:
            case "function_call":
                item.arguments = text
                name = "response.function_call_arguments.done"
                events.append(self._of_item(name, name=item.name, arguments=text))
            case "custom_tool_call":
                item.input = text
                events.append(self._of_item("response.custom_tool_call_input.done", input=text))
            case "message":
                part = _output_text(text, self._logprobs)
                item.content = [part]
                events.append(self._of_part("response.output_text.done", text=text, logprobs=self._logprobs))
                events.append(self._of_part("response.content_part.done", part=part))
            case "reasoning":
                part = ResponsePart(type="reasoning_text", text=text)
                item.content = [part]
                if self._encodes_reasoning:
                    item.encrypted_content = encode_reasoning(text)
                events.append(self._of_part("response.reasoning_text.done", text=text))
                events.append(self._of_part("response.content_part.done", part=part))
        item.status = status
        events.append(self._event("response.output_item.done", output_index=self._index, item=item))
        self._open, self._texts, self._logprobs = None, [], []
        return events

    def _new_id(self, prefix: str) -> str:
        return self._ids.make(prefix, len(self.response.output))

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    def _of_item(self, type_: str, **fields: Any) -> ResponseEvent:
        assert self._open is not None
        return self._event(type_, output_index=self._index, item_id=self._open.id, **fields)

    def _of_part(self, type_: str, **fields: Any) -> ResponseEvent:
        return self._of_item(type_, content_index=0, **fields)

    def _event(self, type_: str, **fields: Any) -> ResponseEvent:
        self._number += 1
        return ResponseEvent(type=type_, sequence_number=self._number - 1, **fields)


def _output_text(text: str, logprobs: list[TokenLogprob]) -> ResponsePart:
    return ResponsePart(type="output_text", text=text, annotations=[], logprobs=logprobs)

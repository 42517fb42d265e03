"""Pieces of an answer -> the Responses API's items and its event sequence. Sends nothing; `responses.py` does."""

from __future__ import annotations

import copy
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from stoker.proto.openai import (
    FlatTool,
    KvTransfer,
    KvTransfers,
    ReasoningConfig,
    TextConfig,
    TokenLogprob,
    ToolChoice,
    UsageReport,
)
from stoker.text.parsers.contract import ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStart
from stoker.worker.generate import Piece
from stoker.worker.ids import AnswerIds
from stoker.worker.logprobs import TokenBytes, content_logprobs

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponsePart(msgspec.Struct, kw_only=True):
    type: Literal["output_text", "reasoning_text"]
    text: str = ""
    annotations: list[Any] | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class ResponseItem(msgspec.Struct, kw_only=True):
    """A message, a function call or reasoning: the fields that its `type` has."""

    id: str
    type: Literal["message", "function_call", "reasoning"]
    status: Status = "in_progress"
    role: Literal["assistant"] | UnsetType = UNSET
    content: list[ResponsePart] | UnsetType = UNSET
    summary: list[Any] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, report: UsageReport) -> ResponseUsage:
        return cls(
            input_tokens=report.prompt_tokens,
            input_tokens_details=InputTokensDetails(report.prompt_tokens_details.cached_tokens),
            output_tokens=report.completion_tokens,
            output_tokens_details=OutputTokensDetails(report.completion_tokens_details.reasoning_tokens),
            total_tokens=report.total_tokens,
        )


class IncompleteDetails(msgspec.Struct):
    reason: str


class ResponseError(msgspec.Struct):
    code: str
    message: str


class ResponseObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[ResponseItem] = []
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: ReasoningConfig
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: TextConfig
    tool_choice: str | ToolChoice
    tools: list[FlatTool]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: Any = None
    metadata: Any = None
    kv_transfer_params: KvTransfer | KvTransfers | UnsetType = UNSET


class ResponseEvent(msgspec.Struct, kw_only=True):
    """Any of the events: the fields that its `type` has."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: ResponseItem | UnsetType = UNSET
    part: ResponsePart | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class ResponseWriter:
    """Keeps the response as it grows; every call returns the events that tell of the change.

    One item is open at a time: a delta of another kind, or of another call, closes it.
    """

    def __init__(self, response: ResponseObject, token_bytes: TokenBytes, ids: AnswerIds) -> None:
        self.response = response
        self._token_bytes = token_bytes
        self._ids = ids
        self._number = 0
        self._open: ResponseItem | None = None
        self._texts: list[str] = []  # of the open item
        self._logprobs: list[TokenLogprob] = []
        self._call_index = -1

    @property
    def started(self) -> bool:
        return self._number > 0

    def start(self) -> list[ResponseEvent]:
        empty = msgspec.structs.replace(self.response, output=[])  # events are encoded later, when it may have grown
        return [
            self._event("response.created", response=empty),
            self._event("response.in_progress", response=empty),
        ]

    def push(self, piece: Piece) -> list[ResponseEvent]:
        events: list[ResponseEvent] = []
        logprobs = content_logprobs(piece.logprobs, self._token_bytes)
        for delta in piece.deltas:
            match delta:
                case TextDelta():
                    events += self._text(delta.text, logprobs)
                    logprobs = []  # a chunk's entries go with its first text
                case ReasoningDelta():
                    events += self._reasoning(delta.text)
                case ToolCallStart():
                    events += self._call(delta)
                case ToolArgumentsDelta() if delta.index == self._call_index:
                    self._texts.append(delta.text)
                    events.append(self._of_item("response.function_call_arguments.delta", delta=delta.text))
        return events

    def finish(self, reason: Literal["stop", "length"], usage: UsageReport) -> list[ResponseEvent]:
        status: Status = "incomplete" if reason == "length" else "completed"
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
        item = ResponseItem(
            id=self._new_id("fc_"), type="function_call", call_id=start.call_id, name=start.name, arguments=""
        )
        return self._begin(item)

    def _begin(self, item: ResponseItem) -> list[ResponseEvent]:
        events = self._close("completed")
        self._open = item
        self.response.output.append(item)
        events.append(self._event("response.output_item.added", output_index=self._index, item=copy.copy(item)))
        return events

    def _close(self, status: Status) -> list[ResponseEvent]:
        item, text = self._open, "".join(self._texts)
        if item is None:
            return []
        events = []
        if item.type == "function_call":
            item.arguments = text
            name = "response.function_call_arguments.done"
            events.append(self._of_item(name, name=item.name, arguments=text))
        elif item.type == "message":
            part = _output_text(text, self._logprobs)
            item.content = [part]
            events.append(self._of_part("response.output_text.done", text=text, logprobs=self._logprobs))
            events.append(self._of_part("response.content_part.done", part=part))
        else:
            part = ResponsePart(type="reasoning_text", text=text)
            item.content = [part]
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

"""`/v1/responses`: its request, its response and the events of a stream."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from stoker.proto.handoff import KvTransferParams
from stoker.proto.openai.answers import TokenLogprob, UsageReport
from stoker.proto.openai.field_types import Ignored, NotHonoured, Refused, TokenLimit, TopLogprobs
from stoker.proto.openai.fields import ContentPart, GenerationFields, ResponseFormat
from stoker.proto.openai.tools import FlatTool, ToolChoice, ToolMode


class InputItem(msgspec.Struct, kw_only=True):
    """An item of `input`. Its fields depend on `type`; without one it is a message."""

    type: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    format: ResponseFormat | None = None
    verbosity: Ignored = None  # named in a response header


class ReasoningConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(GenerationFields, kw_only=True):
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    tools: list[FlatTool] | None = None
    tool_choice: ToolMode | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    max_output_tokens: TokenLimit | None = None
    top_logprobs: TopLogprobs | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: NotHonoured = None
    context_management: NotHonoured = None
    previous_response_id: Refused = None
    conversation: Refused = None
    prompt: Refused = None
    image: Refused = None
    access_programs: NotHonoured = None
    background: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponsePart(msgspec.Struct, kw_only=True):
    type: Literal["output_text", "reasoning_text"]
    text: str = ""
    annotations: list[Any] | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class ResponseItem(msgspec.Struct, kw_only=True):
    """A message, a function call or reasoning. Only the fields of its `type` are set."""

    id: str
    type: Literal["message", "function_call", "reasoning"]
    status: ResponseStatus = "in_progress"
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
    status: ResponseStatus = "in_progress"
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
    kv_transfer_params: KvTransferParams | UnsetType = UNSET


class InputTokenCount(msgspec.Struct, kw_only=True):
    """The answer of `/v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponseEvent(msgspec.Struct, kw_only=True):
    """An event of any kind. Only the fields of its `type` are set."""

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

"""`/v1/responses`: its request, its response and the events of a stream."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from stoker.proto.handoff import KvTransferParams
from stoker.proto.openai.answers import TokenLogprob, UsageReport
from stoker.proto.openai.field_types import Count, Ignored, NotHonoured, Refused, TokenLimit, TopLogprobs
from stoker.proto.openai.fields import ContentPart, GenerationFields, ResponseFormat
from stoker.proto.openai.tools import CLIENT_TOOLS, FlatTool, ToolChoice, ToolMode


class InputItem(msgspec.Struct, kw_only=True):
    """An item of `input`. Its fields depend on `type`; without one it is a message.

    Items of hosted tools have other types in these fields, and are ignored.
    """

    type: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: Any = None  # of a custom tool call: text
    output: str | list[ContentPart] | dict[str, Any] | None = None
    summary: list[ContentPart] | None = None  # this and the next: of reasoning
    encrypted_content: str | None = None
    tools: list[Any] | None = None  # of `additional_tools` and `tool_search_output`


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
    max_tool_calls: Count | None = None  # bounds the calls of hosted tools, and there are none
    client_metadata: Ignored = None  # of Codex
    context_management: NotHonoured = None
    previous_response_id: Refused = None
    conversation: Refused = None
    prompt: Refused = None
    image: Refused = None
    access_programs: NotHonoured = None
    background: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def hosted_tools(self) -> list[str]:
        """Return the types of the tools that only OpenAI can run. They are left out."""
        return [tool.type for tool in self.tools or () if tool.type not in CLIENT_TOOLS]


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponsePart(msgspec.Struct, kw_only=True):
    type: Literal["output_text", "reasoning_text"]
    text: str = ""
    annotations: list[Any] | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class ResponseItem(msgspec.Struct, kw_only=True):
    """A message, a tool call or reasoning. Only the fields of its `type` are set."""

    id: str
    type: Literal["message", "function_call", "custom_tool_call", "reasoning"]
    status: ResponseStatus = "in_progress"
    role: Literal["assistant"] | UnsetType = UNSET
    content: list[ResponsePart] | UnsetType = UNSET
    summary: list[Any] | UnsetType = UNSET
    encrypted_content: str | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    namespace: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0  # OpenAI's price for filling a cache; there is none here


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
    max_tool_calls: int | None = None
    model: str
    output: list[ResponseItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None = None
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

    @classmethod
    def of(cls, body: ResponsesRequest, response_id: str, created_s: int, model: str) -> ResponseObject:
        """Return the response to `body` before anything is generated."""
        return cls(
            id=response_id,
            created_at=created_s,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            model=model,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning=body.reasoning or ReasoningConfig(),
            service_tier="flex" if body.service_tier == "flex" else "default",
            temperature=1.0 if body.temperature is None else body.temperature,
            text=TextConfig(format=(body.text and body.text.format) or ResponseFormat(type="text")),
            tool_choice=body.tool_choice or "auto",
            tools=[tool for tool in body.tools or () if tool.type in CLIENT_TOOLS],
            top_logprobs=body.top_logprobs or 0,
            top_p=1.0 if body.top_p is None else body.top_p,
            truncation=body.truncation or "disabled",
            user=body.user,
            metadata=body.metadata or {},
        )


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
    input: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET

"""`/v1/chat/completions`: its request, its answer and the chunks of a stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from stoker.proto.handoff import KvTransferParams
from stoker.proto.openai.answers import TokenLogprob, UsageReport
from stoker.proto.openai.field_types import Ignored, NotHonoured, TokenLimit, TopLogprobs
from stoker.proto.openai.fields import MAX_CHOICES, ContentPart, GenerationFields, ResponseFormat
from stoker.proto.openai.prediction import PredictedOutput
from stoker.proto.openai.tools import (
    CalledFunction,
    Function,
    FunctionCall,
    FunctionName,
    PastToolCall,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)

ChatFinish = Literal["stop", "length", "tool_calls", "function_call"]


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[PastToolCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None  # the older form of `tool_calls`
    reasoning_content: str | None = None
    reasoning: Any = None
    refusal: str | None = None


class ThinkingOption(msgspec.Struct, kw_only=True):
    """The field `thinking` of GLM, Kimi and Anthropic: "disabled", or one of several ways to think."""

    type: str
    budget_tokens: Ignored = None  # named in a response header
    display: str | None = None  # "omitted": the reasoning is not returned


class ReasoningOption(msgspec.Struct, kw_only=True):
    """OpenRouter's field `reasoning`."""

    effort: str | None = None
    enabled: bool | None = None
    exclude: bool | None = None  # true: the reasoning is not returned
    max_tokens: Ignored = None
    summary: Ignored = None


class ChatRequest(GenerationFields, kw_only=True):
    messages: list[Message] | None = None  # may be missing if prompt_token_ids is given
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolMode | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    prediction: PredictedOutput | None = None
    verbosity: NotHonoured = None
    audio: NotHonoured = None
    web_search_options: NotHonoured = None
    functions: list[Function] | None = None  # this and the next: the older form of `tools` and `tool_choice`
    function_call: Literal["none", "auto"] | FunctionName | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    separate_reasoning: bool | None = None  # false: the reasoning stays in the content
    stream_reasoning: Ignored = None
    include_reasoning: bool | None = None  # false: the reasoning is not returned
    enable_thinking: bool | None = None  # of Qwen
    thinking: bool | ThinkingOption | None = None
    think: bool | str | None = None  # of Ollama: a switch, or an effort
    reasoning: ReasoningOption | None = None

    @property
    def effort(self) -> str | None:
        """Return the reasoning effort, whatever the client calls it."""
        if self.reasoning_effort is not None:
            return self.reasoning_effort
        if self.reasoning is not None and self.reasoning.effort is not None:
            return self.reasoning.effort
        return self.think if isinstance(self.think, str) else None

    @property
    def thinks(self) -> bool | None:
        """Return whether the client wants the model to think first. None: as the model's template does it."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        if self.thinking is not None:
            return self.thinking.type != "disabled" if isinstance(self.thinking, ThinkingOption) else self.thinking
        if isinstance(self.think, bool):
            return self.think
        return None if self.reasoning is None else self.reasoning.enabled

    @property
    def hides_reasoning(self) -> bool:
        if self.include_reasoning is False or (self.reasoning is not None and self.reasoning.exclude):
            return True
        return isinstance(self.thinking, ThinkingOption) and self.thinking.display == "omitted"


class ChoiceLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same text, under the name that newer clients read
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET  # to a request with `functions`


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: ChatFinish
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReport
    system_fingerprint: str
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: KvTransferParams | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class CustomDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    input: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    index: int
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: ChatFinish | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: UsageReport | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: KvTransferParams | UnsetType = UNSET

"""OpenAI's request, answer, chunk and error shapes, and how a body becomes one of them.

What can be said about a field alone stands here, in its type; what needs the model (its context, its vocabulary, its
tools) is the worker's. Fields marked `Ignored` are OpenAI's and change nothing on a server that keeps nothing.
"""

from __future__ import annotations

import functools
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from stoker.base.errors import InvalidRequest

Ignored = Any  # taken and not looked at
Refused = Any  # OpenAI's, not ours: anything but null is answered with a 400 that names it

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
SEED_MASK = (1 << 63) - 1
_INT64 = (1 << 63) - 1
_INT32 = (1 << 31) - 1

Count = Annotated[int, Meta(ge=1, le=_INT32)]
CountOrZero = Annotated[int, Meta(ge=0, le=_INT32)]
TokenId = Annotated[int, Meta(ge=0, le=_INT32)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
ToolMode = Literal["none", "auto", "required"]
ChatFinish = Literal["stop", "length", "tool_calls"]


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index`: choice 0 has the request's own, so that n=1 with that seed repeats it."""
    return (seed + index * 0x9E3779B97F4A7C15) & SEED_MASK


# ---- parts of requests


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: Ignored = None


class ContentPart(msgspec.Struct, kw_only=True):
    """`text`, and in the Responses API `input_text` and `output_text`; other kinds have fields that we do not read."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    refusal: str | None = None


class Function(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: str
    function: Function | None = None


class FunctionName(msgspec.Struct, kw_only=True):
    name: str


class ToolReference(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str
    name: str | None = None
    function: FunctionName | None = None


class AllowedTools(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[ToolReference]


class ToolChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`{"type": "function", "function": {"name": ...}}`; flat, without `function`, in the Responses API."""

    type: str
    function: FunctionName | None = None
    name: str | None = None
    allowed_tools: AllowedTools | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ToolReference] | None = None


class JsonSchema(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`regex` and `grammar` are ours; the Responses API has the schema's fields flat, beside `type`."""

    type: str
    json_schema: JsonSchema | None = None
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None
    regex: str | None = None
    grammar: str | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's extension."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None


class LoggedToken(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A struct, not a tuple: in a union with an int that has bounds, msgspec 0.22 mixes up a tuple's length with them."""

    token_id: TokenId
    logprob: float
    top_ids: list[TokenId]
    top_logprobs: list[float]


class ResumedChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a choice had said. Where the request asks for logprobs, its tokens come with them."""

    token_ids: list[TokenId | LoggedToken] = []
    finished: bool = False


class Resume(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An answer that another worker began: `choices` has one for each, in their order. A stream goes on where it was cut,
    a whole answer is whole."""

    created: Annotated[int, Meta(ge=0, le=_INT64)]
    choices: list[ResumedChoice]
    events: CountOrZero | None = None  # in the Responses API: that the client has got; None: all that the tokens made


LeaseName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,144}\Z")]


class KvTransfer(msgspec.Struct, kw_only=True):
    """Where one choice's KV can be pulled: a prefill worker's answer, which goes into decode's request as it is. The names are
    vLLM's, whose proxies pass it on; `transfer_mode` tells ours from other engines'."""

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    transfer_mode: Literal["stoker"] = "stoker"
    remote_engine_id: Annotated[str, Meta(min_length=1, max_length=256)]
    remote_host: Annotated[str, Meta(min_length=1, max_length=256)]
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    remote_request_id: LeaseName
    remote_num_tokens: CountOrZero = 0  # 0: not known yet, to whoever asks ahead
    remote_block_ids: Ignored = []  # ours have keys; proxies look for the field
    lease_s: Annotated[float, Meta(gt=0, le=1e6)] = 30.0


class KvTransfers(msgspec.Struct, kw_only=True):
    """The same for an answer of several choices, in their order; null for one that has ended."""

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    transfer_mode: Literal["stoker"] = "stoker"
    choices: list[KvTransfer | None]


# ---- requests


class GenerationFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What all three generating endpoints take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Meta(ge=-_INT64 - 1, le=_INT64)] | None = None
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    moderation: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None

    # Extensions, under the names that vLLM gave them where it has them.
    top_k: Annotated[int, Meta(ge=-1, le=_INT32)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: CountOrZero | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # SGLang's name for it; routers in front of us send it with every request
    return_hidden_states: bool | None = None  # SGLang's; true is refused
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    prompt_token_ids: list[TokenId] | None = None
    resume: Resume | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    session_id: Ignored = None  # for the router in front of us
    priority: Annotated[int, Meta(ge=-_INT32, le=_INT32)] | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    kv_transfer_params: dict[str, Any] | None = None  # a hand-off's, of whatever engine: worker/handoff.py reads it


class ChatRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    messages: list[Message] | None = None  # may be missing where prompt_token_ids stand for them
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolMode | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    prediction: Ignored = None
    verbosity: Ignored = None
    audio: Refused = None
    web_search_options: Refused = None
    functions: Refused = None
    function_call: Refused = None

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    separate_reasoning: bool | None = None  # false: thinking stays in the content
    stream_reasoning: Ignored = None
    include_reasoning: bool | None = None  # false is refused: thinking is what the answer is made of


class CompletionRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[str | TokenId | list[TokenId]] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Count | None = None
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """An item of the Responses API's `input`; which fields count depends on `type` (a message where it is missing)."""

    type: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class FlatTool(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    format: ResponseFormat | None = None
    verbosity: Ignored = None


class ReasoningConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    tools: list[FlatTool] | None = None
    tool_choice: ToolMode | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    max_output_tokens: Count | None = None
    top_logprobs: TopLogprobs | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: Ignored = None
    context_management: Ignored = None
    previous_response_id: Refused = None
    conversation: Refused = None
    prompt: Refused = None
    image: Refused = None
    access_programs: Ignored = None
    background: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[TokenId]


# ---- answers


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class UsageReport(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same, under the name that newer clients read
    tool_calls: list[ToolCall] | UnsetType = UNSET


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
    kv_transfer_params: KvTransfer | KvTransfers | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


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
    kv_transfer_params: KvTransfer | KvTransfers | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Chunks of a stream have the same shape."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageReport | UnsetType | None = UNSET
    kv_transfer_params: KvTransfer | KvTransfers | UnsetType = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "stoker"
    root: str
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(msgspec.Struct):
    prompt: str


class ErrorBody(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct):
    error: ErrorBody


# ---- bodies -> requests

T = TypeVar("T", bound=msgspec.Struct)

_MISSING = re.compile(r"Object missing required field `([^`]+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]+)`")
_PLACE = re.compile(r" - at `(?:key in )?\$([^`]*)`$")


@functools.cache
def _decoder(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def decode(kind: type[T], body: bytes) -> T:
    """The request in `body`, or InvalidRequest with the field in `param`."""
    try:
        request: T = _decoder(kind).decode(body)
        return request
    except msgspec.ValidationError as wrong:
        raise _named(str(wrong)) from None
    except msgspec.DecodeError as wrong:
        raise InvalidRequest(f"The request's body is not valid JSON: {wrong}.", code="invalid_json") from None
    except UnicodeDecodeError:
        raise InvalidRequest("The request's body is not valid UTF-8.", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("The request's body is nested too deeply.", code="invalid_json") from None


def convert(kind: type[T], value: object, param: str) -> T:
    """The same of a part that was decoded already and stands at `param`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as wrong:
        raise _named(str(wrong), param) from None


def _named(wrong: str, within: str = "") -> InvalidRequest:
    """msgspec's "Expected `int` >= 1 - at `$.n`" in OpenAI's words, with the place as `param`."""
    place = _PLACE.search(wrong)
    path = (within + (place.group(1).replace("[...]", "") if place else "")).removeprefix(".")
    what = wrong[: place.start()] if place else wrong
    if missing := _MISSING.fullmatch(what):
        field = f"{path}.{missing.group(1)}" if path else missing.group(1)
        return InvalidRequest(f"Missing required parameter: '{field}'.", param=field, code="missing_required_parameter")
    if unknown := _UNKNOWN.fullmatch(what):
        field = f"{path}.{unknown.group(1)}" if path else unknown.group(1)
        return InvalidRequest(f"Unrecognized request argument supplied: {field}", param=field, code="unknown_parameter")
    if not path:
        return InvalidRequest(f"The request's body must be a JSON object: {what[0].lower()}{what[1:]}.")
    return InvalidRequest(f"Invalid value for '{path}': {what[0].lower()}{what[1:]}.", param=path, code="invalid_value")

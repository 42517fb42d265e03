"""`/v1/completions`: its request and its answer."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from stoker.proto.handoff import KvTransferParams
from stoker.proto.openai.answers import UsageReport
from stoker.proto.openai.field_types import TokenId, TokenLimit, TopLogprobs
from stoker.proto.openai.fields import MAX_CHOICES, GenerationFields, ResponseFormat
from stoker.proto.openai.prediction import PredictedOutput


class CompletionRequest(GenerationFields, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[int, Meta(ge=0, le=MAX_CHOICES)] | None = None  # 0 is the same as none
    max_tokens: TokenLimit | None = None
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None
    prediction: PredictedOutput | None = None  # as in chat; OpenAI has it only there


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


class TextCompletion(msgspec.Struct, kw_only=True):
    """An answer, and a chunk of a stream: both have the same shape."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageReport | UnsetType | None = UNSET
    kv_transfer_params: KvTransferParams | UnsetType = UNSET

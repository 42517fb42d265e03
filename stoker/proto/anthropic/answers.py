"""`/v1/messages`: its answer, and that of `/v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from stoker.proto.handoff import KvTransferParams

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageUsage(msgspec.Struct, kw_only=True):
    """The prompt has `input_tokens`, `cache_creation_input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int

    @classmethod
    def of(cls, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> MessageUsage:
        cached_tokens = min(cached_tokens, prompt_tokens)
        return cls(
            input_tokens=prompt_tokens - cached_tokens,
            cache_read_input_tokens=cached_tokens,
            output_tokens=completion_tokens,
        )


class AnswerBlock(msgspec.Struct, kw_only=True):
    """A text, the model's thinking, or a tool call. Only the fields of its `type` are set."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | UnsetType = UNSET
    citations: UnsetType | None = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET


class MessageObject(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    kv_transfer_params: KvTransferParams | UnsetType = UNSET


class MessageTokenCount(msgspec.Struct):
    input_tokens: int

"""Request fields that the generating endpoints share.

The type of a field holds every check that needs only the field. Checks that need the model (context length, vocabulary,
tools) are in `worker/`. A field of type `Ignored` belongs to an API that clients speak and has no meaning here. Fields that are
not declared are accepted too (`unknown_fields.py`).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from stoker.proto.openai.field_types import (
    INT32_MAX,
    INT64_MAX,
    CountOrZero,
    Ignored,
    NotHonoured,
    Penalty,
    TokenId,
    TokenLimit,
)
from stoker.proto.resume_notes import Resume

MAX_CHOICES = 128
MIN_TENANT_WEIGHT, MAX_TENANT_WEIGHT = 1e-6, 1e6
FLEX_PRIORITY = 16
SEED_MASK = (1 << 63) - 1


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of choice `index`. Choice 0 has the seed of the request, so n=1 with that seed repeats it."""
    return (seed + index * 0x9E3779B97F4A7C15) & SEED_MASK


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: Ignored = None
    continuous_usage_stats: Ignored = None  # of vLLM and SGLang


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message: `text`, or `input_text` and `output_text` in the Responses API."""

    type: str
    text: str | None = None
    refusal: str | None = None


class JsonSchema(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The format that the answer must have.

    `regex` and `grammar` are our extensions. In the Responses API the fields of `json_schema` stand beside `type`.
    """

    type: str
    json_schema: JsonSchema | None = None
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None
    regex: str | None = None
    grammar: str | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's field `structured_outputs`. A constraint that is not known is refused: the answer would not fit it."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None
    whitespace_pattern: Ignored = None
    disable_fallback: Ignored = None
    disable_any_whitespace: Ignored = None
    disable_additional_properties: Ignored = None


class UsageOption(msgspec.Struct, kw_only=True):
    """OpenRouter's field `usage`."""

    include: bool | None = None


class TenantShare(msgspec.Struct, frozen=True):
    """Whose request it is. Tenants share a worker's prefill by weight."""

    tenant: str
    weight: Annotated[float, Meta(ge=MIN_TENANT_WEIGHT, le=MAX_TENANT_WEIGHT)] = 1.0


class GenerationFields(msgspec.Struct, kw_only=True):
    """The fields that all generating endpoints know."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    user: Ignored = None
    metadata: Ignored = None
    store: NotHonoured = None
    service_tier: NotHonoured = None
    moderation: NotHonoured = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None

    # Extensions of OpenAI's API. They have vLLM's names where vLLM has them.
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None  # the name in llama.cpp and Ollama
    stop_token_ids: list[TokenId] | None = None
    min_tokens: CountOrZero | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # SGLang's name for include_stop_str_in_output; some routers always send it
    return_hidden_states: bool | None = None  # SGLang's field; true is refused
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    json_schema: dict[str, Any] | str | None = None  # this and the next two: SGLang's names for the same
    regex: str | None = None
    ebnf: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: TokenLimit | None = None  # keep only the last tokens of the prompt; -1: as many as fit
    usage: UsageOption | None = None
    cache_prompt: Ignored = None  # of llama.cpp; prompts are always cached
    prompt_token_ids: list[TokenId] | None = None
    resume: Resume | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    session_id: Ignored = None  # read by the gateway
    priority: Annotated[int, Meta(ge=-INT32_MAX, le=INT32_MAX)] | None = None
    tenant_share: TenantShare | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    kv_transfer_params: dict[str, Any] | None = None  # of any engine; decoded in worker/handoff.py

    @property
    def engine_priority(self) -> int:
        """Return the priority in the engine. Flex requests run after all others; a gateway has set their priority."""
        return FLEX_PRIORITY if self.priority is None and self.service_tier == "flex" else self.priority or 0

    @property
    def wants_usage(self) -> bool:
        """True if a stream must end with a usage chunk."""
        if self.stream_options and self.stream_options.include_usage:
            return True
        return bool(self.usage and self.usage.include)

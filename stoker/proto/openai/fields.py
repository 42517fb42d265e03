"""What the generating endpoints share: the kinds of fields, and the fields that all of them take.

What can be said about a field alone stands in its type; what needs the model (its context, its vocabulary, its tools) is
the worker's. Fields marked `Ignored` are OpenAI's and change nothing on a server that keeps nothing.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

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


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index`: choice 0 has the request's own, so that n=1 with that seed repeats it."""
    return (seed + index * 0x9E3779B97F4A7C15) & SEED_MASK


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: Ignored = None


class ContentPart(msgspec.Struct, kw_only=True):
    """`text`, and in the Responses API `input_text` and `output_text`; other kinds have fields that we do not read."""

    type: str
    text: str | None = None
    refusal: str | None = None


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
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
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

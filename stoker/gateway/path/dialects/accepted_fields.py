"""Which fields of a client's body reach a foreign engine. Everything else is dropped.

Foreign engines take fields that are meant for a trusted router: they choose the KV cache (`extra_key`), other requests
(`rid`, `request_id`), sessions, adapters, code (`custom_logit_processor`, `logits_processors`, `chat_template`), tensors
(`prompt_embeds`) or another server's KV. So only fields that concern the client's own request pass: OpenAI's, and the
sampling and grammar fields of vLLM and SGLang. `cache_salt` and `priority` pass because the gateway has limited them to the
client's tenant and key. `best_of` and beam search do not pass, because they generate tokens that appear in no bill.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Raw

from stoker.base.log import EventLog
from stoker.gateway.api.client_body import envelope_fields
from stoker.gateway.path.call import Call
from stoker.gateway.path.dialects.media_urls import check_media


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# OpenAI's fields of the three endpoints, without those that read or write answers stored by an engine: `store`,
# `previous_response_id`, `conversation` and `background`. An engine does not know whose answers they are.
_OPENAI = _names(
    """
    model messages prompt input instructions stream stream_options n max_tokens max_completion_tokens
    max_output_tokens temperature top_p frequency_penalty presence_penalty logit_bias logprobs top_logprobs stop
    seed response_format tools tool_choice parallel_tool_calls functions function_call reasoning_effort reasoning
    verbosity text truncation include metadata service_tier user safety_identifier prompt_cache_key prediction
    modalities suffix echo max_tool_calls web_search_options
    """
)
# Extensions that vLLM and SGLang share, and that other servers with OpenAI's API know or ignore.
_SAMPLING = _names(
    """
    top_k min_p repetition_penalty min_tokens stop_token_ids ignore_eos skip_special_tokens
    include_stop_str_in_output return_token_ids chat_template_kwargs add_generation_prompt continue_final_message
    cache_salt priority
    """
)
_VLLM = _names(
    """
    structured_outputs guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern
    structural_tag include_reasoning spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs
    allowed_token_ids bad_words length_penalty add_special_tokens documents return_tokens_as_token_ids
    prompt_token_ids thinking_token_budget
    """
)
_SGLANG = _names(
    """
    json_schema regex ebnf stop_regex no_stop_trim separate_reasoning stream_reasoning return_cached_tokens_details
    """
)
OPENAI_FIELDS = _OPENAI | _SAMPLING
VLLM_FIELDS = OPENAI_FIELDS | _VLLM
SGLANG_FIELDS = OPENAI_FIELDS | _SGLANG

# A client invents any number of names. These are known to be dangerous, and so worth a label of their own.
_NAMED = _names(
    """
    extra_key rid request_id lora_path custom_logit_processor custom_params logits_processors session_id
    session_params return_hidden_states return_routed_experts chat_template mm_processor_kwargs media_io_kwargs
    prompt_embeds vllm_xargs ngram_corpus_id custom_labels images_config best_of use_beam_search
    guided_decoding_backend store previous_response_id conversation background
    """
)
_OTHER = "other"
# Of these, OpenAI's own. A client that sends one is told in a response header that it has no effect.
_OPENAI_DROPPED = _names("store previous_response_id conversation background moderation audio context_management")
_ASKS_NOTHING = (b"null", b"false", b"[]", b"{}")
# Arguments of the templates' renderer itself. In `chat_template_kwargs` they would replace the template or its input.
_RENDERER = _names(
    """
    chat_template conversation messages tools documents tokenize padding truncation max_length return_tensors
    return_dict return_assistant_tokens_mask tokenizer_kwargs continue_final_message add_generation_prompt
    """
)
_MAX_KWARG_CHARS = 256

log = EventLog("dialect")


class ForeignBodyRules(Protocol):
    """What the operator decided about the bodies of foreign engines. `Legs` implements it."""

    @property
    def dropped_fields(self) -> dict[str, int]:
        """Counts the fields that were not passed to a foreign engine."""

    @property
    def media_hosts(self) -> Collection[str]:
        """The hosts from which a foreign engine may fetch what a client's URLs name."""


def accepted_body(
    call: Call,
    accepted: frozenset[str],
    rules: ForeignBodyRules,
    put: Mapping[str, bytes],
    drop: Sequence[str] = (),
    may_add: Collection[str] = (),
) -> bytes:
    """Return the body for a foreign engine: `Call.body` with the accepted fields only.

    Raises InvalidRequest if the body points the engine to a URL that it may not fetch.
    """
    check_media(call.envelope, rules.media_hosts)
    given = envelope_fields(call.envelope)
    if given.keys() <= accepted and "chat_template_kwargs" not in given:
        return call.body(put, drop, may_add)
    refused = [name for name in given if name not in accepted]
    for name in refused:
        _count(rules.dropped_fields, name)
    call.ignored_fields = [
        name for name in refused if name in _OPENAI_DROPPED and bytes(given[name]) not in _ASKS_NOTHING
    ]
    if "chat_template_kwargs" in given and (kept := _template_kwargs(given["chat_template_kwargs"])) is not None:
        put = {"chat_template_kwargs": kept, **put}
        refused.append("chat_template_kwargs")
    return call.body(put, [*refused, *drop], may_add)


def _template_kwargs(raw: Raw) -> bytes | None:
    """Return the arguments for the chat template without those for its renderer; None if all of them may pass."""
    try:
        given = msgspec.json.decode(raw, type=dict[str, Any] | None) or {}
    except msgspec.DecodeError:
        return b"{}"
    kept = {name: value for name, value in given.items() if name not in _RENDERER and _is_plain(value)}
    return None if len(kept) == len(given) else msgspec.json.encode(kept)


def _is_plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, bool | int | float)
        or (isinstance(value, str) and len(value) <= _MAX_KWARG_CHARS)
    )


def _count(dropped: dict[str, int], name: str) -> None:
    label = name if name in _NAMED else _OTHER
    dropped[label] = dropped.get(label, 0) + 1
    if dropped[label] == 1:
        log.warning(
            "field_dropped", field=label, example=name[:64], hint="foreign engines get only fields of docs/gateway.md"
        )

"""A request's sampling fields -> SamplingParams, checked against the model: vocabulary, context, grammars."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from stoker.base.errors import ContextTooLong, InvalidRequest
from stoker.proto.openai import SEED_MASK, GenerationFields, ResponseFormat
from stoker.sched.request import GrammarSpec, SamplingParams
from stoker.worker.config import HttpConfig


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What of the model the checks need."""

    vocab_size: int
    max_model_tokens: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the output must match, and the field that said so."""

    grammar: GrammarSpec
    param: str


def resolve_sampling(
    request: GenerationFields,
    limits: ModelLimits,
    config: HttpConfig,
    num_logprobs: int | None,
    grammar: GrammarSpec | None,
) -> SamplingParams:
    """Choice 0's; the others differ in their seed."""
    stop_ids = _checked_ids(request.stop_token_ids or (), "stop_token_ids", limits.vocab_size)
    if not request.ignore_eos:
        stop_ids += tuple(id_ for id_ in limits.eos_token_ids if id_ not in stop_ids)
    seed = secrets.randbits(63) if request.seed is None else request.seed & SEED_MASK
    return SamplingParams(
        temperature=_default(request.temperature, 1.0),
        top_p=_default(request.top_p, 1.0),
        top_k=max(0, request.top_k or 0),
        min_p=_default(request.min_p, 0.0),
        frequency_penalty=_default(request.frequency_penalty, 0.0),
        presence_penalty=_default(request.presence_penalty, 0.0),
        repetition_penalty=_default(request.repetition_penalty, 1.0),
        logit_bias=_logit_bias(request.logit_bias or {}, limits.vocab_size, config.max_logit_biases),
        seed=seed,
        num_logprobs=num_logprobs,
        stop_token_ids=stop_ids,
        min_tokens=request.min_tokens or 0,
        grammar=grammar,
    )


def resolve_stops(stop: str | list[str] | None, config: HttpConfig) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > config.max_stops:
        raise InvalidRequest(
            f"Invalid 'stop': {len(stops)} strings were given, at most {config.max_stops} are allowed.", param="stop"
        )
    for i, text in enumerate(stops):
        if not text:
            param = "stop" if isinstance(stop, str) else f"stop[{i}]"
            raise InvalidRequest("Invalid 'stop': a stop string must not be empty.", param=param)
    return stops


def resolve_max_tokens(
    asked: int | None, param: str, num_prompt: int, prompt_param: str, limits: ModelLimits, min_tokens: int
) -> int:
    """How many tokens may be generated; by default all that the context has left."""
    context = limits.max_model_tokens
    if num_prompt == 0:
        raise InvalidRequest("The prompt is empty: it must have at least one token.", param=prompt_param)
    if num_prompt + (asked or 1) > context:
        completion = f", {asked} in the completion" if asked is not None else " and no room for a completion"
        raise ContextTooLong(
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{num_prompt + (asked or 0)} tokens ({num_prompt} in the prompt{completion}). "
            "Please reduce the length of the prompt or completion.",
            param=param if asked is not None and num_prompt < context else prompt_param,
        )
    allowed = context - num_prompt if asked is None else asked
    if min_tokens > allowed:
        raise InvalidRequest(
            f"Invalid 'min_tokens': {min_tokens} is more than the {allowed} allowed.", param="min_tokens"
        )
    return allowed


def check_token_ids(token_ids: Iterable[int], param: str, limits: ModelLimits) -> list[int]:
    return list(_checked_ids(token_ids, param, limits.vocab_size))


def resolve_constraint(
    request: GenerationFields, response_format: ResponseFormat | None, param: str = "response_format"
) -> Constraint | None:
    """The one way in which this request constrains its output; more than one is an error."""
    found = [*_of_format(response_format, param), *_of_guided(request), *_of_structured(request)]
    if len(found) > 1:
        names = ", ".join(constraint.param for constraint in found)
        raise InvalidRequest(f"Only one of these can constrain the output: {names}.", param=found[1].param)
    return found[0] if found else None


def _of_format(form: ResponseFormat | None, param: str) -> list[Constraint]:
    if form is None or form.type == "text":
        return []
    if form.type == "json_object":
        return [Constraint(GrammarSpec("json_object"), param)]
    if form.type == "json_schema":
        nested = form.json_schema
        schema = nested.schema if nested is not None else form.schema
        place = f"{param}.json_schema" if nested is not None or param == "response_format" else param
        if schema is None:
            missing = f"{place}.schema" if nested is not None or param != "response_format" else place
            raise InvalidRequest(f"Missing required parameter: '{missing}'.", param=missing)
        return [Constraint(_schema_grammar(schema, f"{place}.schema"), f"{place}.schema")]
    if form.type in ("regex", "grammar"):
        text = form.regex if form.type == "regex" else form.grammar
        if not text:
            raise InvalidRequest(f"Missing required parameter: '{param}.{form.type}'.", param=f"{param}.{form.type}")
        kind = GrammarSpec("regex", text) if form.type == "regex" else GrammarSpec("ebnf", text)
        return [Constraint(kind, f"{param}.{form.type}")]
    raise InvalidRequest(
        f"Invalid value for '{param}.type': '{form.type}'. Supported values are: 'text', 'json_object', "
        "'json_schema', 'regex' and 'grammar'.",
        param=f"{param}.type",
    )


def _of_guided(request: GenerationFields) -> list[Constraint]:
    found = []
    if request.guided_json is not None:
        found.append(Constraint(_schema_grammar(request.guided_json, "guided_json"), "guided_json"))
    if request.guided_regex:
        found.append(Constraint(GrammarSpec("regex", request.guided_regex), "guided_regex"))
    if request.guided_grammar:
        found.append(Constraint(GrammarSpec("ebnf", request.guided_grammar), "guided_grammar"))
    if request.guided_choice is not None:
        found.append(Constraint(_choice_grammar(request.guided_choice, "guided_choice"), "guided_choice"))
    return found


def _of_structured(request: GenerationFields) -> list[Constraint]:
    asked, name = request.structured_outputs, "structured_outputs"
    if asked is None:
        return []
    found = []
    if asked.json is not None:
        found.append(Constraint(_schema_grammar(asked.json, f"{name}.json"), f"{name}.json"))
    if asked.regex:
        found.append(Constraint(GrammarSpec("regex", asked.regex), f"{name}.regex"))
    if asked.grammar:
        found.append(Constraint(GrammarSpec("ebnf", asked.grammar), f"{name}.grammar"))
    if asked.choice is not None:
        found.append(Constraint(_choice_grammar(asked.choice, f"{name}.choice"), f"{name}.choice"))
    if asked.json_object:
        found.append(Constraint(GrammarSpec("json_object"), f"{name}.json_object"))
    return found


def _schema_grammar(schema: dict[str, Any] | bool | str, param: str) -> GrammarSpec:
    if not isinstance(schema, str):
        return GrammarSpec("json_schema", msgspec.json.encode(schema).decode())
    try:
        parsed = msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError) as wrong:
        raise InvalidRequest(f"Invalid '{param}': not valid JSON: {wrong}.", param=param) from None
    if not isinstance(parsed, dict | bool):
        raise InvalidRequest(f"Invalid '{param}': a JSON schema is an object.", param=param)
    return GrammarSpec("json_schema", schema)


def _choice_grammar(choices: list[str], param: str) -> GrammarSpec:
    if not choices or not all(choices):
        raise InvalidRequest(f"Invalid '{param}': it needs at least one choice, and none may be empty.", param=param)
    return GrammarSpec("ebnf", "root ::= " + " | ".join(msgspec.json.encode(choice).decode() for choice in choices))


def _logit_bias(biases: dict[str, float], vocab_size: int, max_biases: int) -> dict[int, float]:
    if len(biases) > max_biases:
        raise InvalidRequest(
            f"Invalid 'logit_bias': {len(biases)} entries were given, at most {max_biases} are allowed.",
            param="logit_bias",
        )
    resolved = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) < 11 and int(key) < vocab_size):
            raise InvalidRequest(
                f"Invalid key in 'logit_bias': {key[:32]!r}. Keys must be token ids from 0 to {vocab_size - 1}.",
                param="logit_bias",
            )
        resolved[int(key)] = bias
    return resolved


def _checked_ids(token_ids: Iterable[int], param: str, vocab_size: int) -> tuple[int, ...]:
    ids = tuple(token_ids)
    if ids and max(ids) >= vocab_size:
        i = next(i for i, id_ in enumerate(ids) if id_ >= vocab_size)
        raise InvalidRequest(
            f"Invalid '{param}': token id {ids[i]} is not below the vocabulary's size, {vocab_size}.",
            param=f"{param}[{i}]",
        )
    return ids


def _default(value: float | None, default: float) -> float:
    return default if value is None else value

"""Sampling fields of a request, checked against the vocabulary and context length of the model."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from stoker.base.errors import ContextTooLong, InvalidRequest
from stoker.proto.openai.fields import SEED_MASK, GenerationFields
from stoker.sched.request import GrammarSpec, SamplingParams
from stoker.worker.config import HttpConfig

_LEAST_TEMPERATURE = 1e-6  # at this temperature only the most likely token can be sampled


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the checks need to know about the model."""

    vocab_size: int
    max_model_tokens: int
    eos_token_ids: tuple[int, ...]


def resolve_sampling(
    request: GenerationFields,
    limits: ModelLimits,
    config: HttpConfig,
    num_logprobs: int | None,
    grammar: GrammarSpec | None,
) -> SamplingParams:
    """Return the parameters of choice 0. The other choices differ in their seed."""
    stop_ids = _stop_token_ids(request.stop_token_ids or [], limits.vocab_size, config.max_stop_token_ids)
    if not request.ignore_eos:
        stop_ids += tuple(id_ for id_ in limits.eos_token_ids if id_ not in stop_ids)
    seed = secrets.randbits(63) if request.seed is None else request.seed & SEED_MASK
    return SamplingParams(
        temperature=_temperature(_default(request.temperature, 1.0)),
        top_p=_default(request.top_p, 1.0),
        top_k=max(0, request.top_k or 0),
        min_p=_default(request.min_p, 0.0),
        frequency_penalty=_default(request.frequency_penalty, 0.0),
        presence_penalty=_default(request.presence_penalty, 0.0),
        repetition_penalty=_default(request.repetition_penalty, _default(request.repeat_penalty, 1.0)),
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


def token_limit(requested: int | None, param: str) -> int | None:
    """Return the client's limit on output tokens. None and -1 mean no limit."""
    if requested == 0:
        raise InvalidRequest(f"Invalid value for '{param}': 0. Expected at least 1.", param=param, code="invalid_value")
    return None if requested == -1 else requested


def resolve_max_tokens(
    requested: int | None,
    param: str,
    num_prompt: int,
    prompt_param: str,
    limits: ModelLimits,
    min_tokens: int,
    *,
    fits_context: bool = False,
) -> int:
    """Return how many tokens may be generated. The default is what is left of the context.

    With `fits_context`, a larger request is reduced to that.
    """
    context = limits.max_model_tokens
    if fits_context and requested is not None and num_prompt < context < num_prompt + requested:
        requested = context - num_prompt
    if num_prompt == 0:
        raise InvalidRequest("The prompt is empty. It must have at least one token.", param=prompt_param)
    if num_prompt + (requested or 1) > context:
        completion = f", {requested} in the completion" if requested is not None else " and no room for a completion"
        raise ContextTooLong(
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{num_prompt + (requested or 0)} tokens ({num_prompt} in the prompt{completion}). "
            "Please reduce the length of the prompt or completion.",
            param=param if requested is not None and num_prompt < context else prompt_param,
        )
    allowed = context - num_prompt if requested is None else requested
    if min_tokens > allowed:
        raise InvalidRequest(
            f"Invalid 'min_tokens': {min_tokens} is more than the {allowed} allowed.", param="min_tokens"
        )
    return allowed


def check_token_ids(token_ids: Iterable[int], param: str, limits: ModelLimits) -> list[int]:
    return list(_checked_ids(token_ids, param, limits.vocab_size))


def _temperature(requested: float) -> float:
    """Return 0 for tiny temperatures: logits divided by them would be infinite."""
    return requested if requested >= _LEAST_TEMPERATURE else 0.0


def _stop_token_ids(token_ids: list[int], vocab_size: int, max_ids: int) -> tuple[int, ...]:
    if len(token_ids) > max_ids:
        raise InvalidRequest(
            f"Invalid 'stop_token_ids': {len(token_ids)} were given, at most {max_ids} are allowed.",
            param="stop_token_ids",
        )
    return _checked_ids(token_ids, "stop_token_ids", vocab_size)


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
            f"Invalid '{param}': token id {ids[i]} must be below the vocabulary size {vocab_size}.",
            param=f"{param}[{i}]",
        )
    return ids


def _default(value: float | None, default: float) -> float:
    return default if value is None else value

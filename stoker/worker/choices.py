"""The choices that answer a prompt: the fields of a request, checked against the model, as sequences ready to run."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stoker.base.errors import InvalidRequest
from stoker.base.ids import RequestId
from stoker.proto.openai.answers import CompletionTokensDetails, PromptTokensDetails, UsageReport
from stoker.proto.openai.fields import GenerationFields, TenantShare, choice_seed
from stoker.sched.request import GenerateRequest
from stoker.text.detokenizer import Detokenizer
from stoker.text.stops import StopStrings
from stoker.worker.config import HttpConfig
from stoker.worker.constraint import Constraint
from stoker.worker.endpoint import AnswerSetup
from stoker.worker.generate import Choice
from stoker.worker.handoff import resolve_handoff
from stoker.worker.output import OutputParser
from stoker.worker.prompts import TokenizedPrompt
from stoker.worker.resume import Resumed, resumed_choices
from stoker.worker.sampling import resolve_max_tokens, resolve_sampling, resolve_stops, token_limit

_NO_TENANT = TenantShare("")


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How a prompt is answered, from fields that have other names in each API. `..._param` is the name for errors."""

    prompt_param: str
    n: int = 1
    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    num_logprobs: int | None = None
    constraint: Constraint | None = None
    num_prompts: int = 1  # prompts of the request, each with `n` choices
    continues_text: bool = False  # the answer continues the text of the prompt, so its first space is kept
    keep_special_tokens: bool = False  # a parser needs them in the text
    prediction: tuple[int, ...] = ()  # the tokens that the client expects
    hides_reasoning: bool = False
    drops_oldest: bool = False  # the oldest turns of a conversation that does not fit the context are dropped
    fits_context: bool = False  # a larger `max_tokens` means the rest of the context, and is no error


def make_choices(
    setup: AnswerSetup,
    fields: GenerationFields,
    options: GenerationOptions,
    prompt: TokenizedPrompt,
    new_parser: Callable[[int], OutputParser],
    *,
    first_index: int = 0,
) -> list[Choice]:
    """Return the choices of one prompt. They have the indexes from `first_index` on."""
    context = setup.context
    limits, config = context.limits, context.config
    _check_supported(fields, options, config)
    grammar = options.constraint.grammar if options.constraint else None
    sampling = resolve_sampling(fields, limits, config, options.num_logprobs, grammar)
    stops = resolve_stops(fields.stop, config)
    max_tokens = resolve_max_tokens(
        token_limit(options.max_tokens, options.max_tokens_param),
        options.max_tokens_param,
        len(prompt.token_ids),
        options.prompt_param,
        limits,
        sampling.min_tokens,
        fits_context=options.fits_context,
    )
    num_choices = options.num_prompts * options.n
    handoff = resolve_handoff(fields.kv_transfer_params, num_choices, context.service.info, context.log)
    resumed = resumed_choices(fields, num_choices, options.num_logprobs, limits)
    resumed = resumed[first_index : first_index + options.n]
    _check_lengths(resumed, first_index, max_tokens)
    include_stop = bool(fields.include_stop_str_in_output or fields.no_stop_trim)
    skip_special = fields.skip_special_tokens is not False and not options.keep_special_tokens
    tokenizer = context.text.tokenizer
    continues_text = options.continues_text and not tokenizer.special_ids.issuperset(prompt.token_ids)
    share = fields.tenant_share or _NO_TENANT
    deadline_s = None if fields.timeout_s is None else time.monotonic() + fields.timeout_s
    unique = uuid.uuid4().hex  # clients may reuse an X-Request-Id; the engine needs unique ids

    def lease_id(i: int) -> str | None:
        # An answer that ends with its first token does not continue elsewhere, so its lease would never be used.
        is_last = len(resumed[i].token_ids) + 1 >= max_tokens
        return None if setup.continues_elsewhere and is_last else handoff.lease_id(first_index + i)

    return [
        Choice(
            index=first_index + i,
            request=GenerateRequest(
                request_id=RequestId(f"{unique}-{i}"),
                token_ids=prompt.token_ids + resumed[i].token_ids,
                num_prompt=len(prompt.token_ids),
                sampling=replace(sampling, seed=choice_seed(sampling.seed, i)),
                max_new_tokens=max_tokens,
                cache_salt=fields.cache_salt or "",
                priority=fields.engine_priority,
                tenant=share.tenant,
                tenant_weight=share.weight,
                deadline_s=deadline_s,
                lease_id=lease_id(i),
                ticket=handoff.ticket(first_index + i),
                prediction=options.prediction,
                is_flex=fields.service_tier == "flex",
            ),
            detokenizer=Detokenizer(tokenizer, skip_special, continues_text),
            stops=StopStrings(stops, include_stop),
            parser=new_parser(first_index + i),
            counts_prompt=i == 0,
            keep_stop_token=include_stop,
            grammar_param=options.constraint.param if options.constraint else None,
            resumed_logprobs=resumed[i].logprobs,
            ended=resumed[i].finished,
            continues_elsewhere=setup.continues_elsewhere,
            hides_reasoning=options.hides_reasoning,
        )
        for i in range(options.n)
    ]


def _check_supported(fields: GenerationFields, options: GenerationOptions, config: HttpConfig) -> None:
    if options.n > config.max_choices:
        raise InvalidRequest(f"Invalid 'n': {options.n} is more than the {config.max_choices} allowed.", param="n")
    if fields.return_hidden_states:
        raise InvalidRequest(
            "Unsupported parameter: 'return_hidden_states': this server does not return hidden states.",
            param="return_hidden_states",
            code="unsupported_parameter",
        )


def _check_lengths(resumed: Sequence[Resumed], first_index: int, max_tokens: int) -> None:
    for i, choice in enumerate(resumed, first_index):
        if len(choice.token_ids) > max_tokens:
            param = f"resume.choices[{i}].token_ids"
            raise InvalidRequest(
                f"Invalid '{param}': {len(choice.token_ids)} tokens, more than the {max_tokens} allowed.", param=param
            )


def usage_report(choices: Sequence[Choice]) -> UsageReport:
    """Return the usage of an answer. A prompt counts once for all its choices, with the cached tokens of the first."""
    firsts = [choice.usage for choice in choices if choice.counts_prompt]
    prompt = sum(usage.prompt_tokens for usage in firsts)
    completion = sum(choice.usage.completion_tokens for choice in choices)
    return UsageReport(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(sum(min(u.cached_tokens, u.prompt_tokens) for u in firsts)),
        completion_tokens_details=_completion_details(choices),
    )


def _completion_details(choices: Sequence[Choice]) -> CompletionTokensDetails:
    """Return the details of the usage. Drafts are reported to clients that sent a prediction, whatever their source."""
    details = CompletionTokensDetails(sum(choice.reasoning_tokens for choice in choices))
    if any(choice.request.prediction for choice in choices):
        accepted = sum(choice.usage.accepted_draft_tokens for choice in choices)
        details.accepted_prediction_tokens = accepted
        details.rejected_prediction_tokens = sum(choice.usage.draft_tokens for choice in choices) - accepted
    return details

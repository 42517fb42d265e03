"""A checked request -> the prompt's token ids and the choices that will answer it. For all that generate."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stoker.base.errors import ContextTooLong, InvalidRequest
from stoker.base.ids import RequestId
from stoker.proto.openai.answers import CompletionTokensDetails, PromptTokensDetails, UsageReport
from stoker.proto.openai.fields import GenerationFields, choice_seed
from stoker.sched.request import GenerateRequest
from stoker.text.conversation import Conversation, render_text
from stoker.text.detokenizer import Detokenizer
from stoker.text.stops import StopStrings
from stoker.text.tools import ToolPlan
from stoker.worker.config import HttpConfig
from stoker.worker.constraint import Constraint
from stoker.worker.context import ModelText, WorkerContext
from stoker.worker.generate import Choice
from stoker.worker.handoff import resolve_handoff
from stoker.worker.ids import AnswerIds
from stoker.worker.output import NoTools, OutputParser, ReasonedOutput, WantedCalls
from stoker.worker.resume import Resumed, resumed_choices
from stoker.worker.sampling import ModelLimits, resolve_max_tokens, resolve_sampling, resolve_stops

_CALL_ID_CHARS = 29  # as OpenAI's
_END_TOKENS = 64  # of a prompt: more than opening the reasoning takes
_NORMALIZED_LENGTH = 4  # normalizing may shorten a text, never by this much


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    text: str | None = None  # None where the client gave token ids


@dataclass(frozen=True, slots=True)
class Asked:
    """How a prompt is to be answered, whatever the endpoint."""

    prompt_param: str
    n: int = 1
    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    num_logprobs: int | None = None
    constraint: Constraint | None = None
    num_prompts: int = 1  # of the request, each with `n` choices
    continues_text: bool = False  # the answer is read as one text with what stands before it
    goes_on: bool = False  # where KV is kept: whoever asks has another worker go on from the first token


def render(text: ModelText, conversation: Conversation, limits: ModelLimits) -> Prompt:
    rendered = render_text(text.template, conversation)
    return Prompt(encode(text, rendered, limits, conversation.param), rendered)


def encode(
    text: ModelText, prompt: str, limits: ModelLimits, param: str, add_special_tokens: bool = False
) -> list[int]:
    """Its token ids; what cannot fit however it is tokenized is refused before megabytes of it are."""
    if len(prompt) > _NORMALIZED_LENGTH * text.longest_token * limits.max_model_tokens:
        raise ContextTooLong(
            f"This model's maximum context length is {limits.max_model_tokens} tokens. However, your prompt has "
            f"{len(prompt)} characters, which are more tokens than that. Please reduce the length of the prompt.",
            param=param,
        )
    return text.tokenizer.encode(prompt, add_special_tokens)


def chat_parser(
    text: ModelText,
    prompt: Prompt,
    tools: ToolPlan,
    *,
    constrained: bool,
    split: bool,
    call_id: Callable[[int], str],
) -> OutputParser:
    """`constrained` answers have no reasoning: their grammar holds from the first token on."""
    reasoning = None
    if text.reasoning_parser is not None and split and not constrained:
        end = prompt.text
        if end is None:
            end = text.tokenizer.decode(prompt.token_ids[-_END_TOKENS:], skip_special_tokens=False)
        reasoning = text.reasoning_parser(text.reasoning_parser.opened_by(end))
    answer: NoTools | WantedCalls = NoTools()
    if tools.mode != "none":
        answer = WantedCalls(text.tool_parser(tools.allowed), tools.parallel, tools.forced, call_id)
    return answer if reasoning is None else ReasonedOutput(reasoning, answer)


def call_ids(ids: AnswerIds, choice: int) -> Callable[[int], str]:
    return lambda call: ids.make("call_", choice, call)[:_CALL_ID_CHARS]


def forced_constraint(text: ModelText, constraint: Constraint | None, tools: ToolPlan) -> Constraint | None:
    """With a forced call, the grammar of the model's own format over the allowed tools: its arguments always parse."""
    if not tools.forced:
        return constraint
    if constraint is not None:
        raise InvalidRequest(
            f"'{constraint.param}' constrains the answer's text, but 'tool_choice' forces a tool call.",
            param=constraint.param.partition(".")[0],
        )
    return Constraint(text.tool_parser.grammar(tools.allowed, parallel=tools.parallel), "tools")


def needs_special_tokens(text: ModelText, tools: ToolPlan) -> bool:
    if tools.mode != "none" and text.tool_parser.needs_special_tokens:
        return True
    return text.reasoning_parser is not None and text.reasoning_parser.needs_special_tokens


def make_choices(
    context: WorkerContext,
    fields: GenerationFields,
    asked: Asked,
    prompt: Prompt,
    new_parser: Callable[[int], OutputParser],
    *,
    first_index: int = 0,
    keep_special_tokens: bool = False,
) -> list[Choice]:
    """The answers to one prompt of the request: choices `first_index` and on."""
    limits, config = context.limits, context.config
    _check_supported(fields, asked, config)
    grammar = asked.constraint.grammar if asked.constraint else None
    sampling = resolve_sampling(fields, limits, config, asked.num_logprobs, grammar)
    stops = resolve_stops(fields.stop, config)
    max_tokens = resolve_max_tokens(
        asked.max_tokens,
        asked.max_tokens_param,
        len(prompt.token_ids),
        asked.prompt_param,
        limits,
        sampling.min_tokens,
    )
    num_choices = asked.num_prompts * asked.n
    handoff = resolve_handoff(fields.kv_transfer_params, num_choices, context.service.info, context.log)
    resumed = resumed_choices(fields, num_choices, asked.num_logprobs, limits)[first_index : first_index + asked.n]
    _check_lengths(resumed, first_index, max_tokens)
    include_stop = bool(fields.include_stop_str_in_output or fields.no_stop_trim)
    skip_special = fields.skip_special_tokens is not False and not keep_special_tokens
    tokenizer = context.text.tokenizer
    continues_text = asked.continues_text and not tokenizer.special_ids.issuperset(prompt.token_ids)
    deadline_s = None if fields.timeout_s is None else time.monotonic() + fields.timeout_s
    unique = uuid.uuid4().hex  # two requests may have one X-Request-Id; the engine must tell them apart

    def lease_id(i: int) -> str | None:
        # An answer that ends with its first token goes on nowhere: nobody would come for the lease.
        is_last = len(resumed[i].token_ids) + 1 >= max_tokens
        return None if asked.goes_on and is_last else handoff.lease_id(first_index + i)

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
                priority=fields.priority or 0,
                deadline_s=deadline_s,
                lease_id=lease_id(i),
                ticket=handoff.ticket(first_index + i),
            ),
            detokenizer=Detokenizer(tokenizer, skip_special, continues_text),
            stops=StopStrings(stops, include_stop),
            parser=new_parser(first_index + i),
            counts_prompt=i == 0,
            keep_stop_token=include_stop,
            grammar_param=asked.constraint.param if asked.constraint else None,
            resumed_logprobs=resumed[i].logprobs,
            ended=resumed[i].finished,
            goes_on=asked.goes_on,
        )
        for i in range(asked.n)
    ]


def _check_supported(fields: GenerationFields, asked: Asked, config: HttpConfig) -> None:
    if asked.n > config.max_choices:
        raise InvalidRequest(f"Invalid 'n': {asked.n} is more than the {config.max_choices} allowed.", param="n")
    if fields.return_hidden_states:
        raise InvalidRequest(
            "Unsupported parameter: 'return_hidden_states': this server keeps none.",
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
    """A prompt counts once, however many choices answer it, with what the first of them found in the cache."""
    firsts = [choice.usage for choice in choices if choice.counts_prompt]
    prompt = sum(usage.prompt_tokens for usage in firsts)
    completion = sum(choice.usage.completion_tokens for choice in choices)
    return UsageReport(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(sum(min(u.cached_tokens, u.prompt_tokens) for u in firsts)),
        completion_tokens_details=CompletionTokensDetails(sum(choice.reasoning_tokens for choice in choices)),
    )

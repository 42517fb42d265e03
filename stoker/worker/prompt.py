"""A checked request -> the prompt's token ids and the choices that will answer it. For all that generate."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stoker.base.errors import ContextTooLong, InvalidRequest
from stoker.base.ids import RequestId
from stoker.proto.openai import (
    CompletionTokensDetails,
    GenerationFields,
    PromptTokensDetails,
    UsageReport,
    choice_seed,
)
from stoker.sched.request import GenerateRequest
from stoker.text.detokenizer import Detokenizer
from stoker.text.stops import StopStrings
from stoker.worker.context import ModelText, WorkerContext
from stoker.worker.generate import Choice
from stoker.worker.output import OutputParser, WantedCalls
from stoker.worker.sampling import (
    Constraint,
    ModelLimits,
    check_token_ids,
    resolve_max_tokens,
    resolve_sampling,
    resolve_stops,
)
from stoker.worker.tools import ToolPlan

_NORMALIZED_LENGTH = 4  # normalizing may shorten a text, never by this much
_RENDERED = ("messages", "tools", "add_generation_prompt")  # a template gets these from the request itself


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template is given."""

    messages: list[dict[str, Any]]
    tools: ToolPlan
    template_kwargs: dict[str, Any]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    param: str = "messages"  # where in the body it came from


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


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def render(text: ModelText, conversation: Conversation, limits: ModelLimits) -> Prompt:
    messages, continued = conversation.messages, conversation.continue_final_message
    if continued and (not messages or messages[-1]["role"] != "assistant" or not messages[-1].get("content")):
        raise InvalidRequest(
            "'continue_final_message' needs an assistant message with content as the last one.",
            param="continue_final_message",
        )
    if continued and conversation.add_generation_prompt:
        raise InvalidRequest(
            "'continue_final_message' and 'add_generation_prompt' cannot both be set.", param="add_generation_prompt"
        )
    rendered = text.template.render(
        messages,
        conversation.tools.shown,
        add_generation_prompt=conversation.add_generation_prompt,
        **conversation.template_kwargs,
    )
    if continued:
        final = str(messages[-1]["content"]).strip()
        at = rendered.rfind(final)
        if at < 0:
            raise InvalidRequest(
                "The model's chat template changes the last message, so it cannot be continued.",
                param="continue_final_message",
            )
        rendered = rendered[: at + len(final)]
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


def num_chars(conversation: Conversation) -> int:
    """Roughly how long the prompt will be: enough to decide where to render it."""
    texts = sum(len(message.get("content") or "") for message in conversation.messages)
    return texts + 512 * len(conversation.tools.offered) + 64 * len(conversation.messages)


def chat_parser(text: ModelText, prompt: Prompt, tools: ToolPlan, constrained: bool, split: bool) -> OutputParser:
    """`constrained` answers have no reasoning: their grammar holds from the first token on."""
    reasoning = None
    if text.reasoning_parser is not None and split and not constrained:
        opened = prompt.text is not None and text.reasoning_parser.opened_by(prompt.text)
        reasoning = text.reasoning_parser(opened)
    if tools.mode == "none":
        return OutputParser(reasoning)
    return OutputParser(reasoning, WantedCalls(text.tool_parser(tools.allowed), tools.parallel, tools.forced))


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


def template_kwargs(
    given: dict[str, Any] | None, effort: str | None = None, constrained: bool = False
) -> dict[str, Any]:
    """The client's own settings, its reasoning effort, and no thinking where a grammar leaves no room for it."""
    kwargs = dict(given or {})
    for name in _RENDERED:
        if name in kwargs:
            raise InvalidRequest(f"'{name}' is no chat template setting.", param="chat_template_kwargs")
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
    if constrained or effort == "none":
        kwargs.setdefault("enable_thinking", False)
    return kwargs


def needs_special_tokens(text: ModelText, tools: ToolPlan) -> bool:
    if tools.mode != "none" and text.tool_parser.needs_special_tokens:
        return True
    return text.reasoning_parser is not None and text.reasoning_parser.needs_special_tokens


def make_choices(
    context: WorkerContext,
    fields: GenerationFields,
    asked: Asked,
    prompt: Prompt,
    new_parser: Callable[[], OutputParser],
    answer_id: str,
    *,
    first_index: int = 0,
    keep_special_tokens: bool = False,
) -> list[Choice]:
    limits, config = context.limits, context.config
    if asked.n > config.max_choices:
        raise InvalidRequest(f"Invalid 'n': {asked.n} is more than the {config.max_choices} allowed.", param="n")
    if fields.kv_transfer_params is not None:
        raise InvalidRequest(
            "'kv_transfer_params' must be null: this worker takes no hand-offs.", param="kv_transfer_params"
        )
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
    resumed = check_token_ids(fields.resume_token_ids or (), "resume_token_ids", limits)
    if resumed and asked.n > 1:
        raise InvalidRequest("'resume_token_ids' continues one choice: 'n' must be 1.", param="resume_token_ids")
    if len(resumed) > max_tokens:
        raise InvalidRequest(
            f"'resume_token_ids' has {len(resumed)} tokens, more than the {max_tokens} allowed.",
            param="resume_token_ids",
        )
    include_stop = bool(fields.include_stop_str_in_output)
    skip_special = fields.skip_special_tokens is not False and not keep_special_tokens
    deadline_s = None if fields.timeout_s is None else time.monotonic() + fields.timeout_s
    return [
        Choice(
            index=first_index + i,
            request=GenerateRequest(
                request_id=RequestId(f"{answer_id}-{first_index + i}"),
                token_ids=prompt.token_ids + resumed,
                num_prompt=len(prompt.token_ids),
                sampling=replace(sampling, seed=choice_seed(sampling.seed, i)),
                max_new_tokens=max_tokens,
                cache_salt=fields.cache_salt or "",
                priority=fields.priority or 0,
                deadline_s=deadline_s,
            ),
            detokenizer=Detokenizer(context.text.tokenizer, skip_special),
            stops=StopStrings(stops, include_stop),
            parser=new_parser(),
            counts_prompt=i == 0,
            keep_stop_token=include_stop,
            grammar_param=asked.constraint.param if asked.constraint else None,
        )
        for i in range(asked.n)
    ]


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

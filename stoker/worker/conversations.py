"""What the two endpoints for conversations, chat and responses, prepare alike: prompt, tools, reasoning, choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from stoker.base.errors import InvalidRequest
from stoker.proto.openai.fields import GenerationFields
from stoker.text.conversation import Conversation, stable_conversation
from stoker.text.tools import ToolPlan
from stoker.worker.choices import GenerationOptions, make_choices
from stoker.worker.constraint import Constraint
from stoker.worker.context import ModelText
from stoker.worker.endpoint import AnswerSetup
from stoker.worker.generate import Choice
from stoker.worker.ids import AnswerIds
from stoker.worker.output import AllowedCalls, NoTools, OutputParser, ReasonedOutput
from stoker.worker.prompts import TokenizedPrompt, given_prompt, render_off_loop, truncated
from stoker.worker.truncation import render_newest

_CALL_ID_CHARS = 29  # the length of OpenAI's ids of tool calls
_END_TOKENS = 64  # at the end of a prompt: longer than any tag that opens the reasoning


@dataclass(frozen=True, slots=True)
class PreparedConversation:
    prompt: TokenizedPrompt
    ids: AnswerIds
    choices: list[Choice]


async def prepare_conversation(
    setup: AnswerSetup,
    body: GenerationFields,
    options: GenerationOptions,
    tools: ToolPlan,
    conversation: Callable[[bool], Conversation],
    *,
    split_reasoning: bool = True,
) -> PreparedConversation:
    """Prepare the choices of a chat or responses request.

    `conversation` builds the messages for the template; its argument says whether a grammar constrains the answer.
    `split_reasoning` takes the reasoning out of the text of the answer.
    """
    context = setup.context
    constraint = forced_constraint(context.text, options.constraint, tools)
    constrained = constraint is not None
    if body.prompt_token_ids is not None:
        prompt = given_prompt(context, body.prompt_token_ids)
        options = replace(options, prompt_param="prompt_token_ids")
    else:
        stable = stable_conversation(conversation(constrained), context.config.volatile_lines)
        specials = bool(body.add_special_tokens)
        if options.drops_oldest:
            prompt = await render_newest(context, stable, options.max_tokens, specials)
        else:
            prompt = await render_off_loop(context, stable, specials)
    prompt = truncated(prompt, body, options.max_tokens, context.limits)
    ids = AnswerIds.of(setup.request_id, setup.created, prompt.token_ids)
    # The grammar of a constrained answer holds from its first token on, so there is no reasoning.
    has_reasoning = split_reasoning and not constrained

    def new_parser(choice: int) -> OutputParser:
        return _parser(context.text, prompt, tools, has_reasoning, _call_ids(ids, choice))

    keeps = _needs_special_tokens(context.text, tools)
    options = replace(options, constraint=constraint, keep_special_tokens=keeps)
    return PreparedConversation(prompt, ids, make_choices(setup, body, options, prompt, new_parser))


def forced_constraint(text: ModelText, constraint: Constraint | None, tools: ToolPlan) -> Constraint | None:
    """Return the grammar of a forced tool call, in the format of the model, so that its arguments always parse."""
    if not tools.forced:
        return constraint
    if constraint is not None:
        raise InvalidRequest(
            f"'{constraint.param}' constrains the answer's text, but 'tool_choice' forces a tool call.",
            param=constraint.param.partition(".")[0],
        )
    return Constraint(text.tool_parser.grammar(tools.allowed, parallel=tools.parallel), "tools")


def _parser(
    text: ModelText, prompt: TokenizedPrompt, tools: ToolPlan, has_reasoning: bool, call_id: Callable[[int], str]
) -> OutputParser:
    answer: NoTools | AllowedCalls = NoTools()
    if tools.mode != "none":
        answer = AllowedCalls(text.tool_parser(tools.allowed), tools.parallel, tools.forced, call_id)
    if text.reasoning_parser is None or not has_reasoning:
        return answer
    end = prompt.text
    if end is None:
        end = text.tokenizer.decode(prompt.token_ids[-_END_TOKENS:], skip_special_tokens=False)
    return ReasonedOutput(text.reasoning_parser(text.reasoning_parser.opened_by(end)), answer)


def _call_ids(ids: AnswerIds, choice: int) -> Callable[[int], str]:
    return lambda call: ids.make("call_", choice, call)[:_CALL_ID_CHARS]


def _needs_special_tokens(text: ModelText, tools: ToolPlan) -> bool:
    if tools.mode != "none" and text.tool_parser.needs_special_tokens:
        return True
    return text.reasoning_parser is not None and text.reasoning_parser.needs_special_tokens

"""What the two endpoints for conversations, chat and responses, prepare alike: prompt, tools, reasoning, choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from stoker.proto.openai.fields import GenerationFields
from stoker.text.conversation import Conversation, stable_conversation
from stoker.text.tools import ToolPlan
from stoker.worker.choices import GenerationOptions, make_choices
from stoker.worker.context import ModelText
from stoker.worker.endpoint import AnswerSetup
from stoker.worker.generate import Choice
from stoker.worker.ids import AnswerIds
from stoker.worker.output import AllowedCalls, NoTools, OutputParser, ReasonedOutput
from stoker.worker.prompts import TokenizedPrompt, given_prompt, render_off_loop, truncated
from stoker.worker.tool_constraint import answer_constraint, check_forced_call
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
    check_forced_call(options.constraint, tools)
    constrained = tools.forced or options.constraint is not None
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
    reasoning = context.text.reasoning_parser
    if reasoning is not None and not reasoning.frames_text and (constrained or not split_reasoning):
        reasoning = None  # the grammar of a constrained answer holds from its first token on
    starts_inside = reasoning is not None and reasoning.opened_by(_end_of(prompt, context.text))
    constraint = answer_constraint(context.text, options.constraint, tools, reasoning, starts_inside)

    def new_parser(choice: int) -> OutputParser:
        answer = _answer_parser(context.text, tools, _call_ids(ids, choice))
        return answer if reasoning is None else ReasonedOutput(reasoning(starts_inside), answer)

    keeps = _needs_special_tokens(context.text, tools)
    options = replace(options, constraint=constraint, keep_special_tokens=keeps)
    return PreparedConversation(prompt, ids, make_choices(setup, body, options, prompt, new_parser))


def _answer_parser(text: ModelText, tools: ToolPlan, call_id: Callable[[int], str]) -> NoTools | AllowedCalls:
    """Return the parser of the answer without its reasoning."""
    if tools.mode == "none":
        return NoTools()
    return AllowedCalls(text.tool_parser(tools.allowed), tools.parallel, tools.forced, call_id)


def _end_of(prompt: TokenizedPrompt, text: ModelText) -> str:
    if prompt.text is not None:
        return prompt.text
    return text.tokenizer.decode(prompt.token_ids[-_END_TOKENS:], skip_special_tokens=False)


def _call_ids(ids: AnswerIds, choice: int) -> Callable[[int], str]:
    return lambda call: ids.make("call_", choice, call)[:_CALL_ID_CHARS]


def _needs_special_tokens(text: ModelText, tools: ToolPlan) -> bool:
    if tools.mode != "none" and text.tool_parser.needs_special_tokens:
        return True
    return text.reasoning_parser is not None and text.reasoning_parser.needs_special_tokens

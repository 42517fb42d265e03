"""Turn a request body into the text of the prompt.

The worker uses this to answer a request, and the gateway to compute the same prompt's block keys. This module knows OpenAI's
request bodies and which of their fields reach the prompt. It does not know sampling, limits or token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from stoker.base.errors import InvalidRequest
from stoker.base.volatile_lines import without_volatile
from stoker.proto.openai.chat import ChatRequest
from stoker.proto.openai.completions import CompletionRequest
from stoker.proto.openai.fields import GenerationFields, ResponseFormat
from stoker.proto.openai.responses import ResponsesRequest
from stoker.text.openai_messages import template_messages
from stoker.text.response_items import input_messages
from stoker.text.template import ChatTemplate
from stoker.text.tools import ToolPlan

# Set by the renderer, so that a client may not set them: `self` is Jinja's own.
_RENDERED = ("messages", "tools", "add_generation_prompt", "self")
_SYSTEM = ("system", "developer")
_THINKING = ("enable_thinking", "thinking")
_CUT = "\U0010fffd"  # a private-use character that marks the end of the message to continue


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a chat template."""

    messages: list[dict[str, Any]]
    tools: ToolPlan
    template_kwargs: dict[str, Any]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    param: str = "messages"  # the field of the body that it came from, for error messages


def chat_conversation(body: ChatRequest, tools: ToolPlan, constrained: bool) -> Conversation:
    continued = bool(body.continue_final_message)
    return Conversation(
        messages=template_messages(body.messages),
        tools=tools,
        template_kwargs=template_kwargs(body.chat_template_kwargs, body.effort, constrained, body.thinks),
        add_generation_prompt=not continued if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continued,
    )


def responses_conversation(body: ResponsesRequest, tools: ToolPlan, constrained: bool) -> Conversation:
    effort = body.reasoning.effort if body.reasoning else None
    return Conversation(
        messages=input_messages(body),
        tools=tools,
        template_kwargs=template_kwargs(body.chat_template_kwargs, effort, constrained),
        param="input",
    )


def stable_conversation(conversation: Conversation, volatile_lines: Sequence[str]) -> Conversation:
    """Return the conversation without the volatile lines at the start of its system prompt."""
    messages = conversation.messages
    if not messages or messages[0]["role"] not in _SYSTEM:
        return conversation
    content = messages[0]["content"]
    kept = without_volatile(content, volatile_lines)
    if kept == content:
        return conversation
    # A system message of nothing but such lines is left out: the template may write its default.
    first = [messages[0] | {"content": kept}] if kept else []
    return replace(conversation, messages=[*first, *messages[1:]])


def completion_prompts(body: CompletionRequest) -> list[tuple[str, str | list[int]]]:
    """Return all prompts, each with the name of its field. A prompt is a string or a list of token ids."""
    prompt = body.prompt
    if body.prompt_token_ids is not None:
        return [("prompt_token_ids", body.prompt_token_ids)]
    if prompt is None:
        raise InvalidRequest("Missing required parameter: 'prompt'.", param="prompt", code="missing_required_parameter")
    if isinstance(prompt, str):
        return [("prompt", prompt)]
    if not prompt:
        raise InvalidRequest("Invalid 'prompt': empty array. Expected at least one element.", param="prompt")
    ids = [item for item in prompt if isinstance(item, int)]
    if ids:
        if len(ids) != len(prompt):
            raise InvalidRequest("Invalid 'prompt': token ids and other items in one array.", param="prompt")
        return [("prompt", ids)]
    return [(f"prompt[{i}]", item) for i, item in enumerate(prompt) if not isinstance(item, int)]


def is_constrained(fields: GenerationFields, form: ResponseFormat | None, tools: ToolPlan) -> bool:
    """Return True if a grammar constrains the answer. Then the model must not think first, which some templates must know."""
    if tools.forced or (form is not None and form.type != "text"):
        return True
    if fields.guided_json is not None or fields.guided_choice is not None:
        return True
    if fields.guided_regex or fields.guided_grammar or fields.regex or fields.ebnf or fields.json_schema is not None:
        return True
    structured = fields.structured_outputs
    if structured is None:
        return False
    if structured.json is not None or structured.choice is not None:
        return True
    return bool(structured.regex or structured.grammar or structured.json_object)


def template_kwargs(
    given: dict[str, Any] | None, effort: str | None = None, constrained: bool = False, thinks: bool | None = None
) -> dict[str, Any]:
    """Return the template's settings: the client's, its reasoning effort, and no thinking if a grammar constrains the answer.

    Templates call the switch for thinking `enable_thinking` (Qwen, GLM) or `thinking` (DeepSeek, Kimi).
    """
    kwargs = dict(given or {})
    for name in _RENDERED:
        if name in kwargs:
            raise InvalidRequest(
                f"Invalid 'chat_template_kwargs': the server sets '{name}' itself; remove it.",
                param="chat_template_kwargs",
            )
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
    if constrained or effort == "none":
        thinks = False
    if thinks is not None:
        given_switch = next((kwargs[name] for name in _THINKING if name in kwargs), thinks)
        for name in _THINKING:
            kwargs.setdefault(name, given_switch)
    return kwargs


def render_text(template: ChatTemplate, conversation: Conversation) -> str:
    """Return the text of the prompt. Raise InvalidRequest if the template cannot render the conversation."""
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
    if continued:
        # Mark the end of the message: the text that the template writes after it could contain the message's own text.
        messages = [*messages[:-1], messages[-1] | {"content": messages[-1]["content"].rstrip() + _CUT}]
    rendered = template.render(
        messages,
        conversation.tools.shown,
        add_generation_prompt=conversation.add_generation_prompt,
        **conversation.template_kwargs,
    )
    if continued:
        rendered, cut, _ = rendered.rpartition(_CUT)
        if not cut:
            raise InvalidRequest(
                "The model's chat template changes the last message, so it cannot be continued.",
                param="continue_final_message",
            )
    return rendered


def num_chars(conversation: Conversation) -> int:
    """Return an estimate of the prompt's length, which decides whether it is rendered on the event loop or on a thread."""
    total = 64 * len(conversation.messages)
    for message in conversation.messages:
        total += len(message.get("content") or "") + len(message.get("reasoning_content") or "")
        total += sum(_num_chars(call["function"]["arguments"]) for call in message.get("tool_calls") or ())
    return total + len(msgspec.json.encode((conversation.tools.shown, conversation.template_kwargs)))


def _num_chars(arguments: str | dict[str, Any]) -> int:
    return len(arguments) if isinstance(arguments, str) else len(msgspec.json.encode(arguments))

"""Texts and conversations to prompts of token ids."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.base.errors import ContextTooLong, InvalidRequest
from stoker.proto.openai.fields import GenerationFields
from stoker.text.conversation import Conversation, num_chars, render_text
from stoker.worker.context import ModelText, WorkerContext
from stoker.worker.sampling import ModelLimits, check_token_ids

_NORMALIZED_LENGTH = 4  # normalizing may shorten a text, but never by this factor


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    token_ids: list[int]
    text: str | None = None  # None if the client gave token ids


def encode(
    text: ModelText, prompt: str, limits: ModelLimits, param: str, add_special_tokens: bool = False
) -> list[int]:
    """Return the token ids of `prompt`. A text that is certainly too long is refused without tokenizing it."""
    if len(prompt) > _NORMALIZED_LENGTH * text.longest_token * limits.max_model_tokens:
        raise ContextTooLong(
            f"This model's maximum context length is {limits.max_model_tokens} tokens. However, your prompt has "
            f"{len(prompt)} characters, which are more tokens than that. Please reduce the length of the prompt.",
            param=param,
        )
    return text.tokenizer.encode(prompt, add_special_tokens)


def render(
    text: ModelText, conversation: Conversation, limits: ModelLimits, add_special_tokens: bool = False
) -> TokenizedPrompt:
    """Apply the model's chat template and tokenize the result. Templates write the special tokens themselves."""
    rendered = render_text(text.template, conversation)
    return TokenizedPrompt(encode(text, rendered, limits, conversation.param, add_special_tokens), rendered)


async def render_off_loop(
    context: WorkerContext, conversation: Conversation, add_special_tokens: bool = False
) -> TokenizedPrompt:
    """Render in a thread if the conversation is long."""
    text, limits = context.text, context.limits
    return await context.off_loop(
        num_chars(conversation), lambda: render(text, conversation, limits, add_special_tokens)
    )


def truncated(
    prompt: TokenizedPrompt, fields: GenerationFields, max_tokens: int | None, limits: ModelLimits
) -> TokenizedPrompt:
    """Return the last tokens of the prompt if the client has set `truncate_prompt_tokens`; -1 keeps as many as fit."""
    kept = fields.truncate_prompt_tokens
    if kept is None:
        return prompt
    if kept == 0:
        raise InvalidRequest(
            "Invalid value for 'truncate_prompt_tokens': 0. Expected at least 1, or -1.", param="truncate_prompt_tokens"
        )
    if kept < 0:
        kept = max(1, limits.max_model_tokens - max(1, max_tokens or 1))
    return prompt if len(prompt.token_ids) <= kept else TokenizedPrompt(prompt.token_ids[-kept:])


def given_prompt(context: WorkerContext, token_ids: list[int], param: str = "prompt_token_ids") -> TokenizedPrompt:
    """Return the prompt of a client that has tokenized it itself."""
    return TokenizedPrompt(check_token_ids(token_ids, param, context.limits))

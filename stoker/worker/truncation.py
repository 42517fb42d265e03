"""`truncation: "auto"`: drops the oldest turns of a conversation that does not fit the context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stoker.base.errors import ContextTooLong
from stoker.text.conversation import Conversation
from stoker.worker.context import WorkerContext
from stoker.worker.prompts import TokenizedPrompt, render_off_loop

_SYSTEM = ("system", "developer")


async def render_newest(
    context: WorkerContext, conversation: Conversation, max_tokens: int | None, add_special_tokens: bool
) -> TokenizedPrompt:
    """Render the conversation with as many of its newest turns as fit beside an answer of `max_tokens`.

    The system prompt and the last turn are always kept. Raises ContextTooLong if they alone do not fit.
    """
    room = context.limits.max_model_tokens - max(1, max_tokens or 1)
    cuts = _cuts(conversation.messages)

    async def fits(cut: int) -> TokenizedPrompt | None:
        try:
            prompt = await render_off_loop(context, _after(conversation, cut), add_special_tokens)
        except ContextTooLong:
            return None
        return prompt if len(prompt.token_ids) <= room else None

    whole = await fits(cuts[0])
    if whole is not None:
        return whole
    low, high = 1, len(cuts) - 1  # a binary search for the first cut that fits, because rendering takes time
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if await fits(cuts[middle]) is not None else (middle + 1, high)
    return await render_off_loop(context, _after(conversation, cuts[min(low, high)]), add_special_tokens)


def _cuts(messages: Sequence[dict[str, Any]]) -> list[int]:
    """Return where a conversation may begin: at its first message after the system prompt, and at each message of the user."""
    begin = _num_system(messages)
    return [begin, *(i for i in range(begin + 1, len(messages)) if messages[i]["role"] == "user")]


def _num_system(messages: Sequence[dict[str, Any]]) -> int:
    return next((i for i, message in enumerate(messages) if message["role"] not in _SYSTEM), len(messages))


def _after(conversation: Conversation, cut: int) -> Conversation:
    messages = conversation.messages
    return replace(conversation, messages=[*messages[: _num_system(messages)], *messages[cut:]])

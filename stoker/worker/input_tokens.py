"""`/v1/responses/input_tokens`: how many tokens the prompt of a request has. Nothing is generated."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from aiohttp import web

from stoker.proto.openai.fields import GenerationFields
from stoker.proto.openai.responses import InputTokenCount, ResponsesRequest
from stoker.text.conversation import Conversation, is_constrained, responses_conversation, stable_conversation
from stoker.text.response_tools import responses_tools
from stoker.worker.context import CONTEXT, WorkerContext, read_body
from stoker.worker.guard import check_fields
from stoker.worker.prompts import given_prompt, render_off_loop
from stoker.worker.responses import refuse_unsupported


async def count_response_input(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    body = context.unknown_fields.decode(ResponsesRequest, await read_body(request, context.config))
    check_fields(request, body)
    context.served_model(body.model)
    refuse_unsupported(body)
    tools = responses_tools(body, context.config.max_tools).plan
    constrained = is_constrained(body, body.text.format if body.text else None, tools)
    count = await num_prompt_tokens(context, body, lambda: responses_conversation(body, tools, constrained))
    return web.Response(body=msgspec.json.encode(InputTokenCount(input_tokens=count)), content_type="application/json")


async def num_prompt_tokens(
    context: WorkerContext, body: GenerationFields, conversation: Callable[[], Conversation]
) -> int:
    """Return the length of a prompt, which may be longer than the model's context."""
    if body.prompt_token_ids is not None:
        return len(given_prompt(context, body.prompt_token_ids).token_ids)
    stable = stable_conversation(conversation(), context.config.volatile_lines)
    return len((await render_off_loop(context, stable, bool(body.add_special_tokens))).token_ids)

"""Endpoints that do not generate: models, tokenize and detokenize, health, readiness, metrics."""

from __future__ import annotations

import msgspec
from aiohttp import web

from stoker.base.errors import InvalidRequest, Overloaded
from stoker.proto.openai.info import (
    DetokenizeAnswer,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    TokenizeRequest,
)
from stoker.text.conversation import Conversation, stable_conversation, template_kwargs
from stoker.text.openai_messages import template_messages
from stoker.text.tools import offered_tools
from stoker.worker.context import CONTEXT, WorkerContext, read_body
from stoker.worker.guard import is_fleet
from stoker.worker.metrics import CONTENT_TYPE
from stoker.worker.prompts import encode, render_off_loop
from stoker.worker.sampling import check_token_ids


class HealthAnswer(msgspec.Struct, kw_only=True):
    status: str
    engine: str
    draining: bool
    running_requests: int
    restarts: int


async def health(request: web.Request) -> web.Response:
    """Answer 200 while this process runs, whatever state the engine is in. Strangers learn nothing else."""
    if not is_fleet(request):
        return _json({"status": "ok"})
    context = request.app[CONTEXT]
    return _json(
        HealthAnswer(
            status="ok",
            engine="ready" if context.service.ready else "starting",
            draining=context.state.draining,
            running_requests=context.state.num_running,
            restarts=context.service.num_restarts,
        )
    )


async def ready(request: web.Request) -> web.Response:
    """Answer 200 while new requests are accepted."""
    context = request.app[CONTEXT]
    context.state.check_accepting()
    if not context.service.ready:
        raise Overloaded("The engine is starting; retry later.", code="engine_starting")
    return _json({"status": "ready"})


async def metrics(request: web.Request) -> web.Response:
    return web.Response(body=request.app[CONTEXT].metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def list_models(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    return _json(ModelList(data=[_card(context, name) for name in context.config.served_names]))


async def show_model(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    name = request.match_info["model"]
    context.served_model(name)
    return _json(_card(context, name))


async def tokenize(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    body = context.unknown_fields.decode(TokenizeRequest, await read_body(request, context.config))
    context.served_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either 'prompt' or 'messages'.", param="prompt")
    tokenizer = context.text.tokenizer
    if body.prompt is not None:
        text = body.prompt
        ids = await context.off_loop(
            len(text),
            lambda: encode(context.text, text, context.limits, "prompt", body.add_special_tokens is not False),
        )
    else:
        conversation = Conversation(
            messages=template_messages(body.messages),
            tools=offered_tools(body.tools, context.config.max_tools),
            template_kwargs=template_kwargs(body.chat_template_kwargs),
            add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
            continue_final_message=bool(body.continue_final_message),
        )
        stable = stable_conversation(conversation, context.config.volatile_lines)
        ids = (await render_off_loop(context, stable)).token_ids
    spelled = [tokenizer.token_bytes(id_).decode("utf-8", "replace") for id_ in ids] if body.return_token_strs else None
    limit = context.limits.max_model_tokens
    return _json(TokenizeAnswer(count=len(ids), max_model_len=limit, tokens=ids, token_strs=spelled))


async def detokenize(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    body = context.unknown_fields.decode(DetokenizeRequest, await read_body(request, context.config))
    context.served_model(body.model)
    ids = check_token_ids(body.tokens, "tokens", context.limits)
    text = await context.off_loop(len(ids), lambda: context.text.tokenizer.decode(ids, skip_special_tokens=False))
    return _json(DetokenizeAnswer(text))


def _card(context: WorkerContext, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=context.created,
        root=context.config.served_names[0],
        max_model_len=context.limits.max_model_tokens,
    )


def _json(answer: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

"""`/stoker/prefetch`: a gateway expects a request here soon, and its KV may as well come nearer now. A hint: what was not
brought by the time the request comes is loaded or computed then."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from aiohttp import web

from stoker.base.errors import InvalidRequest
from stoker.proto.messages import Prefetch
from stoker.proto.openai.chat import ChatRequest
from stoker.proto.openai.completions import CompletionRequest
from stoker.proto.openai.decode import decode
from stoker.proto.openai.responses import ResponsesRequest
from stoker.sched.request import GenerateRequest
from stoker.worker.chat import prepare_chat
from stoker.worker.completions import prepare_completion
from stoker.worker.context import WorkerContext, read_body
from stoker.worker.fleet_side import checked_context
from stoker.worker.handoff import PARAM, resolve_handoff
from stoker.worker.record import RECORD
from stoker.worker.responses import prepare_response


class PrefetchRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`request` is a whole body of the endpoint `path`. With `kv_transfer_params` alone, all that the lease has comes."""

    path: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"] = "/v1/chat/completions"
    request: msgspec.Raw = msgspec.Raw()
    kv_transfer_params: dict[str, Any] | None = None


async def prefetch(request: web.Request) -> web.Response:
    context = checked_context(request)
    body = decode(PrefetchRequest, await read_body(request, context.config))
    if not bytes(body.request) and not body.kv_transfer_params:
        raise InvalidRequest(f"Give 'request', '{PARAM}' or both.", param="request")
    for hint in await _hints(context, body, request[RECORD].request_id):
        context.service.prefetch(hint)
    return web.Response(status=202)


async def _hints(context: WorkerContext, body: PrefetchRequest, request_id: str) -> list[Prefetch]:
    if (body.kv_transfer_params or {}).get("do_remote_decode"):
        param = f"{PARAM}.do_remote_decode"
        raise InvalidRequest(f"Invalid value for '{param}': a prefetch keeps nothing.", param=param)
    if not bytes(body.request):
        tickets = resolve_handoff(body.kv_transfer_params, 1, context.service.info, context.log).tickets
        return [Prefetch(token_ids=[], ticket=ticket) for ticket in tickets if ticket is not None]
    sequences = await _sequences(context, body.path, bytes(body.request), body.kv_transfer_params, request_id)
    return [
        Prefetch(token_ids=sequence.token_ids, cache_salt=sequence.cache_salt, ticket=sequence.ticket)
        for sequence in sequences
    ]


async def _sequences(
    context: WorkerContext, path: str, data: bytes, transfer: dict[str, Any] | None, request_id: str
) -> list[GenerateRequest]:
    """One for each prompt: its choices begin with the same blocks."""
    fields: ChatRequest | CompletionRequest | ResponsesRequest
    match path:
        case "/v1/chat/completions":
            fields = decode(ChatRequest, data)
            fields.kv_transfer_params = transfer
            choices = (await prepare_chat(context, fields, request_id)).choices
        case "/v1/completions":
            fields = decode(CompletionRequest, data)
            fields.kv_transfer_params = transfer
            choices = (await prepare_completion(context, fields, request_id)).choices
        case _:
            fields = decode(ResponsesRequest, data)
            fields.kv_transfer_params = transfer
            choices = [(await prepare_response(context, fields, request_id)).choice]
    return [choice.request for choice in choices if choice.counts_prompt]

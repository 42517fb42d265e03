"""`/stoker/prefetch`: the gateway expects a request here soon, so the worker starts to load its KV.

This is a hint. KV that has not arrived when the request comes is loaded or computed then.
"""

from __future__ import annotations

from aiohttp import web

from stoker.base.errors import InvalidRequest
from stoker.proto.handoff import PARAM, PrefetchRequest
from stoker.proto.messages import Prefetch
from stoker.proto.openai.decode import decode
from stoker.worker.chat import CHAT
from stoker.worker.completions import COMPLETIONS
from stoker.worker.context import CONTEXT, WorkerContext, read_body
from stoker.worker.handoff import resolve_handoff
from stoker.worker.messages import MESSAGES
from stoker.worker.record import RECORD
from stoker.worker.responses import RESPONSES

_ENDPOINTS = {endpoint.path: endpoint for endpoint in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)}


async def prefetch(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    body = decode(PrefetchRequest, await read_body(request, context.config))
    if not bytes(body.request) and not body.kv_transfer_params:
        raise InvalidRequest(f"Give 'request', '{PARAM}' or both.", param="request")
    for hint in await _hints(context, body, request[RECORD].request_id):
        context.service.prefetch(hint)
    return web.Response(status=202)


async def _hints(context: WorkerContext, body: PrefetchRequest, request_id: str) -> list[Prefetch]:
    transfer = body.kv_transfer_params
    if (transfer or {}).get("do_remote_decode"):
        param = f"{PARAM}.do_remote_decode"
        raise InvalidRequest(f"Invalid value for '{param}': a prefetch cannot keep KV for another worker.", param=param)
    if not bytes(body.request):
        tickets = resolve_handoff(transfer, 1, context.service.info, context.log).tickets
        return [Prefetch(token_ids=[], ticket=ticket) for ticket in tickets if ticket is not None]
    choices = await _ENDPOINTS[body.path].choices_of(context, bytes(body.request), transfer, request_id)
    # One hint per prompt is enough: all its choices start with the same blocks.
    sequences = [choice.request for choice in choices if choice.counts_prompt]
    return [
        Prefetch(token_ids=sequence.token_ids, cache_salt=sequence.cache_salt, ticket=sequence.ticket)
        for sequence in sequences
    ]

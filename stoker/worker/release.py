"""`/stoker/release`: no decode worker will pull the KV that this worker keeps, so its leases can end now."""

from __future__ import annotations

from aiohttp import web

from stoker.proto.handoff import ReleaseRequest, lease_id
from stoker.proto.openai.decode import decode
from stoker.worker.context import CONTEXT, read_body


async def release(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    body = decode(ReleaseRequest, await read_body(request, context.config))
    for choice in range(body.num_choices):
        context.service.release(lease_id(body.transfer_id, choice))
    return web.Response(status=202)

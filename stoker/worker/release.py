"""`/stoker/release`: nobody will come for KV that this worker keeps; it need not wait for the end of the lease."""

from __future__ import annotations

from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from stoker.proto.openai.decode import decode
from stoker.worker.context import read_body
from stoker.worker.fleet_side import checked_context
from stoker.worker.handoff import TransferId, lease_name


class ReleaseRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`transfer_id` is the one that the request to keep it had."""

    transfer_id: TransferId
    num_choices: Annotated[int, Meta(ge=1, le=4096)] = 1


async def release(request: web.Request) -> web.Response:
    context = checked_context(request)
    body = decode(ReleaseRequest, await read_body(request, context.config))
    for index in range(body.num_choices):
        context.service.release(lease_name(body.transfer_id, index))
    return web.Response(status=202)

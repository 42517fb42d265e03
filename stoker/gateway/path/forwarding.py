"""Forwards a small request to one worker, and to others if that one cannot be reached."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.base.errors import StokerError
from stoker.fleet.fleet import Member
from stoker.gateway.api.reply import Reply
from stoker.gateway.http import ResponseAborted, ResponseLost, Unreachable, header_block
from stoker.gateway.path.errors import LegFailed
from stoker.gateway.path.failure_kinds import MAX_STRIKES, known_status
from stoker.gateway.path.proxy_settings import ProxySettings
from stoker.gateway.path.upstream import Upstream, Upstreams
from stoker.routing.query import NoWorker

_HEADERS = header_block([(b"content-type", b"application/json")])


async def forward_to_any(
    members: Sequence[Member],
    upstreams: Upstreams,
    settings: ProxySettings,
    path: bytes,
    body: bytes,
    max_answer_bytes: int,
) -> tuple[Reply, Member]:
    """Return the answer of the first worker that gives one, and the worker.

    A body on which two workers were lost goes to no third one: it may be the cause.
    """
    failed: StokerError = NoWorker("No worker of this model is usable now; retry later.")
    num_lost = 0
    for member in members[: 1 + settings.retries]:
        try:
            return await _forward(upstreams.of(member), settings, path, body, max_answer_bytes), member
        except Unreachable as error:
            failed = LegFailed(member.worker_id, "connect", error.message)
        except (ResponseLost, ResponseAborted) as error:
            failed = LegFailed(member.worker_id, "lost", error.message)
            num_lost += 1
            if num_lost == MAX_STRIKES:
                break
    raise failed


async def _forward(
    upstream: Upstream, settings: ProxySettings, path: bytes, body: bytes, max_answer_bytes: int
) -> Reply:
    response = await upstream.pool.send(
        b"POST",
        path,
        _HEADERS + upstream.headers,
        body,
        connect_s=settings.connect_s,
        head_s=settings.first_byte_s,
        idle_s=settings.idle_s,
    )
    answer = await response.read(max_answer_bytes)
    if response.status < 400 and response.status != 200:
        raise ResponseLost(f"status {response.status} for {path.decode()}")
    return Reply(
        known_status(response.status) if response.status >= 400 else 200,
        upstream.to_client.pairs(response.headers),
        answer,
    )

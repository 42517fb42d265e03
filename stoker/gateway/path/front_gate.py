"""Decides from a request's head who sent it and how large its body may be.

A request that needs an API key and has no valid one is refused before its body is read. Paths that need no key, or check
another secret themselves (admin API, registration), get a small limit. So does a key above a rate limit: a larger body is
refused before it is read, and a smaller one by `Admission.claim`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from stoker.base.errors import StokerError
from stoker.base.log import EventLog
from stoker.gateway.admission.admission import rate_limited
from stoker.gateway.admission.api_keys import ApiKeys, Caller, Unauthorized
from stoker.gateway.admission.rate_limits import Refusal
from stoker.gateway.http import PUBLIC, BodyGrant, HeadRefusal, RequestHead
from stoker.gateway.path.call import RequestIds, given_request_id
from stoker.gateway.path.errors import reply_of
from stoker.gateway.path.legs import PATHS
from stoker.gateway.path.tokenize import PATHS as TOKENIZE_PATHS
from stoker.gateway.records.metrics import GatewayMetrics

_ENDPOINTS = {path: kind.value for kind, path in PATHS.items()}
_KEYED = frozenset({*_ENDPOINTS, *TOKENIZE_PATHS})  # the paths that take large bodies

log = EventLog("gateway")


class FrontGate:
    """The gateway's `RequestGate`."""

    def __init__(
        self,
        keys: ApiKeys,
        metrics: GatewayMetrics,
        *,
        max_body_bytes: int,
        max_public_body_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._keys = keys
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._public = BodyGrant(min(max_body_bytes, max_public_body_bytes), account=PUBLIC)
        self._max_public_body_bytes = self._public.max_body_bytes
        self._grants: dict[Caller, BodyGrant] = {}
        self._clock = clock
        self._ids = RequestIds()

    def __call__(self, head: RequestHead, peer: str) -> BodyGrant | HeadRefusal:
        if head.path not in _KEYED or head.method != b"POST":
            return self._public
        try:
            caller = self._keys.authenticate(head)
        except Unauthorized as error:
            return self._refusal(head, peer, error)
        grant = self._grants.get(caller)
        if grant is None:
            # Without keys, the clients are told apart by their addresses.
            account = f"tenant:{caller.tenant}" if caller.known else None
            grant = self._grants[caller] = BodyGrant(self._max_body_bytes, caller, account)
        limiter = caller.limiter
        if limiter.unlimited or (limit := limiter.refusal(self._clock())) is None:
            return grant
        return self._limited(grant, limit, head, peer)

    def _limited(self, grant: BodyGrant, limit: Refusal, head: RequestHead, peer: str) -> BodyGrant:
        error = rate_limited(limit)
        return replace(
            grant, max_body_bytes=self._max_public_body_bytes, beyond=partial(self._refusal, head, peer, error)
        )

    def _refusal(self, head: RequestHead, peer: str, error: StokerError) -> HeadRefusal:
        reply = reply_of(error)
        self._metrics.refusals[error.code] += 1
        endpoint = _ENDPOINTS.get(head.path)
        if endpoint is not None:
            self._metrics.requests[endpoint, reply.status] += 1
        request_id = given_request_id(head.header(b"x-request-id")) or self._ids.new().encode()
        log.warning(
            "request_refused", peer=peer, path=head.path.decode(), code=error.code, request_id=request_id.decode()
        )
        return HeadRefusal(reply.status, [*reply.headers, (b"x-request-id", request_id)], reply.body)

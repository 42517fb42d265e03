"""Decides from a request's head who sent it and how large its body may be.

A request that needs an API key and has no valid one is refused before its body is read. Paths that need no key, or check
another secret themselves (admin API, registration), get a small limit. So does a key above a rate limit: a larger body is
refused before it is read, and a smaller one by `Admission.claim`. An address that floods the paths without a key gets 429.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from stoker.base.errors import Overloaded, StokerError
from stoker.base.log import EventLog
from stoker.gateway.admission.admission import rate_limited
from stoker.gateway.admission.api_keys import ApiKeys, Caller, Unauthorized
from stoker.gateway.admission.rate_limits import Refusal
from stoker.gateway.http import PUBLIC, BodyGrant, HeadRefusal, RequestHead
from stoker.gateway.objects.tenant_objects import UPLOAD_PATHS
from stoker.gateway.path.call import RequestIds, given_request_id
from stoker.gateway.path.cors import cors_pairs
from stoker.gateway.path.embeddings import PATHS as EMBEDDINGS_PATHS
from stoker.gateway.path.errors import reply_of, shaped_for
from stoker.gateway.path.legs import PATHS
from stoker.gateway.path.tokenize import PATHS as TOKENIZE_PATHS
from stoker.gateway.records.metrics import GatewayMetrics
from stoker.proto.cors import NO_CORS, CorsRules

_ENDPOINTS = {path: kind.value for kind, path in PATHS.items()}
# the paths that take large bodies
_KEYED = frozenset({*_ENDPOINTS, *TOKENIZE_PATHS, *EMBEDDINGS_PATHS, *UPLOAD_PATHS})

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
        max_public_per_s: int,
        clock: Callable[[], float],
        cors: CorsRules = NO_CORS,
    ) -> None:
        self._keys = keys
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._public = BodyGrant(min(max_body_bytes, max_public_body_bytes), account=PUBLIC)
        self._max_public_body_bytes = self._public.max_body_bytes
        self._grants: dict[Caller, BodyGrant] = {}
        self._max_public_per_s = max_public_per_s
        self._second = 0
        self._num_public: dict[str, int] = {}  # requests in the current second, by address
        self._clock = clock
        self._ids = RequestIds()
        self._cors = cors

    def __call__(self, head: RequestHead, peer: str) -> BodyGrant | HeadRefusal:
        if head.path not in _KEYED or head.method != b"POST":
            return self._public_grant(head, peer)
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

    def _public_grant(self, head: RequestHead, peer: str) -> BodyGrant | HeadRefusal:
        """Grant a small body, unless the address has sent too many requests of this kind in the current second."""
        second = int(self._clock())
        if second != self._second:
            self._second = second
            self._num_public.clear()
        count = self._num_public[peer] = self._num_public.get(peer, 0) + 1
        if count <= self._max_public_per_s:
            return self._public
        message = (
            f"This address sends more than {self._max_public_per_s} requests per second to paths without an API key;"
            " retry in 1 s."
        )
        return self._refusal(head, peer, Overloaded(message, retry_after_s=1.0, code="rate_limited"))

    def _limited(self, grant: BodyGrant, limit: Refusal, head: RequestHead, peer: str) -> BodyGrant:
        error = rate_limited(limit)
        return replace(
            grant, max_body_bytes=self._max_public_body_bytes, beyond=partial(self._refusal, head, peer, error)
        )

    def _refusal(self, head: RequestHead, peer: str, error: StokerError) -> HeadRefusal:
        name = given_request_id(head.header(b"x-request-id")) or self._ids.new().encode()
        reply = shaped_for(head.path, reply_of(error), name)
        self._metrics.refusals[error.code] += 1
        endpoint = _ENDPOINTS.get(head.path)
        if endpoint is not None:
            self._metrics.requests[endpoint, reply.status] += 1
        log.warning("request_refused", peer=peer, path=head.path.decode(), code=error.code, request_id=name.decode())
        headers = [*reply.headers, (b"x-request-id", name), *cors_pairs(self._cors, head)]
        return HeadRefusal(reply.status, headers, reply.body)

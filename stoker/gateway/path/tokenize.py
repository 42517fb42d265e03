"""`POST /tokenize` and `/detokenize`: forwarded to a worker of the model. They need an API key, but no admission or usage row."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from stoker.base.errors import StokerError
from stoker.fleet.fleet import Fleet
from stoker.fleet.spec import Role
from stoker.gateway.admission.api_keys import ApiKeys
from stoker.gateway.api.endpoint import EndpointRequest
from stoker.gateway.api.reply import Reply, method_not_allowed
from stoker.gateway.config import ProxySettings
from stoker.gateway.http import ResponseAborted, ResponseLost, Unreachable, header_block
from stoker.gateway.path.call import requested_model
from stoker.gateway.path.errors import LegFailed
from stoker.gateway.path.failure_kinds import known_status
from stoker.gateway.path.upstream import Upstream, Upstreams
from stoker.proto.openai.decode import decode
from stoker.routing.query import ModelNotFound, NoWorker

PATHS = frozenset({b"/tokenize", b"/detokenize"})

_ROLES = frozenset(Role)
_HEADERS = header_block([(b"content-type", b"application/json")])
_MAX_ANSWER_BYTES = 64 << 20


class _NamedModel(msgspec.Struct):
    """The only field of the body that the gateway reads."""

    model: str | None = None


class TokenizeEndpoint:
    """Forwards the body to one worker of the model, and to another one if the first cannot be reached."""

    def __init__(
        self, fleet: Fleet, upstreams: Upstreams, keys: ApiKeys, settings: ProxySettings, clock: Callable[[], float]
    ) -> None:
        self._fleet = fleet
        self._upstreams = upstreams
        self._keys = keys
        self._settings = settings
        self._clock = clock

    async def answer(self, request: EndpointRequest) -> Reply:
        self._keys.authenticate(request)
        if request.method != b"POST":
            return method_not_allowed(request.path, request.method, [b"POST"])
        model = requested_model(decode(_NamedModel, request.body).model, self._fleet)
        if model not in self._fleet.models():
            raise ModelNotFound(f"The model {model!r} is not served here.", param="model")
        failed: StokerError = NoWorker(f"No worker of model {model!r} is usable now; retry later.")
        for member in self._fleet.candidates(model, _ROLES, self._clock())[: 1 + self._settings.retries]:
            try:
                return await self._forward(self._upstreams.of(member), request)
            except (Unreachable, ResponseLost, ResponseAborted) as lost:
                failed = LegFailed(member.worker_id, "lost", lost.message)
        raise failed

    async def _forward(self, upstream: Upstream, request: EndpointRequest) -> Reply:
        settings = self._settings
        response = await upstream.pool.send(
            b"POST",
            request.path,
            _HEADERS + upstream.headers,
            request.body,
            connect_s=settings.connect_s,
            head_s=settings.first_byte_s,
            idle_s=settings.idle_s,
        )
        body = await response.read(_MAX_ANSWER_BYTES)
        if response.status < 400 and response.status != 200:
            raise ResponseLost(f"status {response.status} for {request.path.decode()}")
        return Reply(
            known_status(response.status) if response.status >= 400 else 200,
            upstream.to_client.pairs(response.headers),
            body,
        )

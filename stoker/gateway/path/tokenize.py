"""`POST /tokenize`, `/detokenize` and the endpoints that count a prompt's tokens: forwarded to a worker of the model.

They count in their key's limits of requests and of concurrency, but use no tokens, do not wait in the queue and have no usage
row. The body and the number of such requests at a time are bounded, because a worker tokenizes on the threads that also serve
generating requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec

from stoker.base.errors import InvalidRequest, NotFound, Overloaded
from stoker.fleet.fleet import Fleet
from stoker.fleet.spec import Role
from stoker.gateway.admission.admission import Admission
from stoker.gateway.admission.api_keys import ApiKeys, Caller
from stoker.gateway.api.client_body import MAX_NAME_CHARS, check_utf8
from stoker.gateway.api.endpoint import EndpointRequest
from stoker.gateway.api.reply import Reply, method_not_allowed
from stoker.gateway.path.call import requested_model
from stoker.gateway.path.forwarding import forward_to_any
from stoker.gateway.path.model_aliases import NO_ALIASES, ModelAliases, renamed_body
from stoker.gateway.path.proxy_settings import ProxySettings
from stoker.gateway.path.upstream import Upstreams
from stoker.proto.internal_http import COUNT_TOKENS_PATH, INPUT_TOKENS_PATH
from stoker.proto.openai.decode import decode
from stoker.routing.query import ModelNotFound

# Only Stoker workers serve these.
_INPUT_TOKENS = INPUT_TOKENS_PATH.encode()
_COUNTING = frozenset({_INPUT_TOKENS, COUNT_TOKENS_PATH.encode()})
PATHS = frozenset({b"/tokenize", b"/detokenize"}) | _COUNTING

CountedBody = Callable[[Caller, bytes], Awaitable[bytes]]

_ROLES = frozenset(Role)
_MAX_BODY_BYTES = 8 << 20
_MAX_ANSWER_BYTES = 64 << 20
_MAX_PER_TENANT = 8  # requests at a time


class _NamedModel(msgspec.Struct):
    """The only field of the body that the gateway reads."""

    model: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)] | None = None


class TokenizeEndpoint:
    """Forwards the body to one worker of the model, and to others if that one cannot be reached."""

    def __init__(
        self,
        fleet: Fleet,
        upstreams: Upstreams,
        keys: ApiKeys,
        admission: Admission,
        settings: ProxySettings,
        clock: Callable[[], float],
        aliases: ModelAliases = NO_ALIASES,
    ) -> None:
        self._fleet = fleet
        self._upstreams = upstreams
        self._keys = keys
        self._admission = admission
        self._num_open: Counter[str] = Counter()  # by tenant
        self._settings = settings
        self._clock = clock
        self._aliases = aliases

    async def answer(self, request: EndpointRequest, counted_body: CountedBody) -> Reply:
        """Answer a request. `counted_body` adds the stored conversation that a request of the Responses API continues."""
        caller = self._keys.authenticate(request)
        if request.method != b"POST":
            return method_not_allowed(request.path, request.method, [b"POST"])
        await self._admission.prepare(caller)
        claim = self._admission.claim(caller)
        tenant = caller.tenant
        try:
            if self._num_open[tenant] >= _MAX_PER_TENANT:
                message = (
                    f"This tenant has {_MAX_PER_TENANT} tokenize requests at a time, which is the limit; retry later."
                )
                raise Overloaded(message, code="rate_limited")
            self._num_open[tenant] += 1
            try:
                body = request.body
                if request.path == _INPUT_TOKENS:
                    body = await counted_body(caller, body)
                return await self._answer(request.path, body)
            finally:
                self._num_open[tenant] -= 1
        finally:
            claim.done()

    async def _answer(self, path: bytes, body: bytes) -> Reply:
        if len(body) > _MAX_BODY_BYTES:
            raise InvalidRequest(
                f"{path.decode()} accepts bodies of up to {_MAX_BODY_BYTES} bytes, and this one has {len(body)}."
            )
        check_utf8(body)
        name = decode(_NamedModel, body).model
        model = requested_model(name, self._fleet, self._aliases)
        body = renamed_body(body, name, model)
        if model not in self._fleet.models():
            raise ModelNotFound(f"The model {model!r} is not served here.", param="model")
        members = self._fleet.candidates(model, _ROLES, self._clock())
        if path in _COUNTING:
            stoker = [member for member in members if member.spec.dialect == "stoker"]
            if members and not stoker:
                raise NotFound(f"The workers of model {model!r} do not count tokens.", code="unknown_url")
            members = stoker
        reply, _ = await forward_to_any(members, self._upstreams, self._settings, path, body, _MAX_ANSWER_BYTES)
        return reply

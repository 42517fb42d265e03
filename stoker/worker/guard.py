"""Who may use which path of a worker: a middleware in front of all handlers.

With the fleet's secret, every path except /health and /ready needs a signed request (`proto/signed_http.py`). A bearer key
(--api-key-file) opens the generating endpoints and /v1/models to foreign routers and direct users, without the fields that
only a gateway may set. Without a secret everything is open, and `stoker serve` listens on this machine only.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from enum import Enum

from aiohttp import web

from stoker.base.errors import InvalidRequest
from stoker.base.fleet_key import FleetKey
from stoker.proto.internal_http import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    COUNT_TOKENS_PATH,
    INPUT_TOKENS_PATH,
    INTERNAL_HEADER_PREFIX,
    MESSAGES_PATH,
    READY_PATH,
    RESPONSES_PATH,
)
from stoker.proto.openai.fields import GenerationFields
from stoker.proto.signed_http import AUTH_HEADER, CHALLENGE_HEADER, PROOF_HEADER, RequestVerifier
from stoker.worker.context import CONTEXT, read_body
from stoker.worker.identity import Identity

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_PATHS = frozenset({"/health", READY_PATH})
_KEY_PATHS = frozenset(
    {
        CHAT_PATH,
        COMPLETIONS_PATH,
        RESPONSES_PATH,
        MESSAGES_PATH,
        INPUT_TOKENS_PATH,
        COUNT_TOKENS_PATH,
        "/v1/models",
        "/v1/models/{model}",
    }
)
# Only a gateway may set these: they choose a tenant's cache, another worker's KV, the tokens so far, and the queue's order.
_FLEET_FIELDS = ("cache_salt", "kv_transfer_params", "resume", "priority", "tenant_share")
_BEARER = "Bearer "
_KEY_HEADER = "x-api-key"  # where Anthropic's clients put the key
_INLINE_BYTES = 1 << 20  # longer bodies are hashed in a thread


class Access(Enum):
    """What the sender of a request has shown."""

    NOTHING = "nothing"
    KEY = "the bearer key"
    FLEET = "a signature with the fleet's secret"


ACCESS = web.RequestKey("access", Access)
PROOF = web.RequestKey("proof", str)


class Guard:
    """Checks every request before its handler runs, and before its body is read."""

    def __init__(self, identity: Identity) -> None:
        self._verifier = None if identity.secret is None else RequestVerifier(FleetKey(identity.secret))
        self._api_keys = [] if identity.api_key is None else [one.encode() for one in identity.api_key.split("\n")]

    async def admit(self, request: web.Request, path: str) -> None:
        """Note in the request what its sender may do, or raise HTTPUnauthorized. `path` is that of the route."""
        if self._verifier is None:
            request[ACCESS] = Access.FLEET  # no secret: all that reach this port are trusted
            return
        sent = request.headers.get(AUTH_HEADER)
        if sent is not None:
            await self._check_signature(request, self._verifier, sent)
        elif path in OPEN_PATHS:
            request[ACCESS] = Access.NOTHING
        elif path in _KEY_PATHS and self._has_key(request):
            request[ACCESS] = Access.KEY
        else:
            raise self._unauthorized()

    async def _check_signature(self, request: web.Request, verifier: RequestVerifier, sent: str) -> None:
        value = sent.encode("utf-8", "surrogateescape")
        signed = verifier.check(value, request.method.encode(), request.raw_path.encode("utf-8", "surrogateescape"))
        if signed is None:
            raise self._unauthorized()
        context = request.app[CONTEXT]
        body = await read_body(request, context.config) if request.can_read_body else b""
        inline = len(body) <= _INLINE_BYTES
        if not (signed.has_body(body) if inline else await context.off_loop(len(body), lambda: signed.has_body(body))):
            raise self._unauthorized()
        request[ACCESS] = Access.FLEET
        request[PROOF] = signed.proof.decode()

    def _has_key(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "")
        key = given[len(_BEARER) :] if given.startswith(_BEARER) else request.headers.get(_KEY_HEADER)
        if key is None:
            return False
        sent = key.encode("utf-8", "surrogateescape")
        return any(hmac.compare_digest(sent, one) for one in self._api_keys)

    def _unauthorized(self) -> web.HTTPUnauthorized:
        assert self._verifier is not None
        text = (
            f"The header '{AUTH_HEADER}' is missing, wrong or was used before: this worker answers the gateways of its fleet. "
            "Give worker and gateway the same --secret-file. Other clients may generate with the key of --api-key-file."
        )
        return web.HTTPUnauthorized(text=text, headers={CHALLENGE_HEADER: self._verifier.challenge})


GUARD = web.AppKey("guard", Guard)


@web.middleware
async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware: run the handler only if the sender may use this path."""
    resource = request.match_info.route.resource
    await request.app[GUARD].admit(request, resource.canonical if resource is not None else "")
    return await handler(request)


async def show_proof(request: web.Request, response: web.StreamResponse) -> None:
    """Prove to the sender of a signed request that this worker has the secret too."""
    if PROOF in request:
        response.headers[PROOF_HEADER] = request[PROOF]


def is_fleet(request: web.Request) -> bool:
    """Return True if the request comes from a gateway, or if this worker has no secret."""
    return request[ACCESS] is Access.FLEET


def check_fields(request: web.Request, body: GenerationFields) -> None:
    """Refuse what only a gateway may send, if the request came with the bearer key."""
    if is_fleet(request):
        return
    for name in _FLEET_FIELDS:
        if getattr(body, name) is not None:
            message = f"Invalid parameter: '{name}' may only be set by the gateways of this fleet. Leave it out."
            raise InvalidRequest(message, param=name, code="unknown_parameter")
    for name in (sent.lower() for sent in request.headers):
        if name.startswith(INTERNAL_HEADER_PREFIX):
            message = f"The header '{name}' may only be sent by the gateways of this fleet. Leave it out."
            raise InvalidRequest(message, param=name, code="unknown_parameter")

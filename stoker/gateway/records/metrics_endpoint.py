"""`GET /metrics`: the gateway's Prometheus metrics. Where API keys are configured, reading them needs a token.

The metrics name workers, models and traffic, which one tenant must not learn about the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stoker.gateway.admission.api_keys import AdminToken
from stoker.gateway.api.endpoint import EndpointRequest
from stoker.gateway.api.reply import Reply, error_reply, text_reply
from stoker.gateway.records.metrics import CONTENT_TYPE, GatewayMetrics

_NO_TOKEN = (
    "This gateway has API keys, so /metrics needs a token: send `Authorization: Bearer TOKEN` with the token of"
    " --metrics-token-file or --admin-token-file."
)


class MetricsEndpoint:
    """Handles /metrics. `is_open()` is True while there are no API keys: then no token is needed."""

    def __init__(self, metrics: GatewayMetrics, tokens: Sequence[AdminToken], *, is_open: Callable[[], bool]) -> None:
        self._metrics = metrics
        self._tokens = tokens
        self._is_open = is_open

    async def answer(self, request: EndpointRequest) -> Reply:
        if not self._is_open() and not any(token.allows(request) for token in self._tokens):
            reply = error_reply(401, _NO_TOKEN, code="invalid_metrics_token")
            return Reply(reply.status, [*reply.headers, (b"www-authenticate", b"Bearer")], reply.body)
        return text_reply(self._metrics.render(), CONTENT_TYPE)

"""The check that every admin endpoint makes first."""

from __future__ import annotations

from stoker.gateway.admission.api_keys import AdminToken
from stoker.gateway.api.endpoint import EndpointRequest
from stoker.gateway.api.reply import Reply, error_reply

_NO_TOKEN = "Admin requests need the admin token: send it as `Authorization: Bearer TOKEN`."
_DISABLED = "The admin API is disabled: start the gateway with --admin-token-file."


def admin_refusal(token: AdminToken, request: EndpointRequest) -> Reply | None:
    """Return the refusal of a request without the admin token, or None if it is allowed."""
    if not token.configured:
        return error_reply(404, _DISABLED, code="unknown_url")
    if not token.allows(request):
        return error_reply(401, _NO_TOKEN, code="invalid_admin_token")
    return None

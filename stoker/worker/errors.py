"""Errors of a worker's server, and how they look on HTTP."""

from __future__ import annotations

from aiohttp import web

from stoker.base.errors import DeadlineExceeded, InvalidRequest, StokerError
from stoker.proto.openai.decode import nested_too_deeply
from stoker.proto.openai.errors import ErrorObject, HttpError, http_error
from stoker.proto.signed_http import CHALLENGE_HEADER
from stoker.sched.request import Finish

# Error codes of the engine that mean that the request itself is wrong.
_CLIENT_CODES = frozenset({"duplicate_lease", "invalid_grammar", "kv_too_small", "unknown_token"})
_HTTP_CODES = {401: "invalid_secret", 404: "unknown_url", 405: "method_not_allowed", 413: "body_too_large"}

_PASSED_HEADERS = ("Allow", CHALLENGE_HEADER)


class ClientStalled(StokerError):
    """The client stopped reading, so its request was cancelled."""

    code = "client_stalled"


class BodyTooSlow(StokerError):
    """The client did not send its whole request body in time."""

    code = "request_timeout"


def worker_http_error(error: BaseException) -> HttpError:
    """Return what a client gets for `error`."""
    match error:
        case web.HTTPException():
            return _of_aiohttp(error)
        case RecursionError():
            # Only a client's JSON is nested. It could be decoded, but not be encoded again inside another object.
            return http_error(nested_too_deeply(), "server")
        case _:
            return http_error(error, "server")


def error_of(finish: Finish) -> StokerError | None:
    """Return the error that a sequence ended with, or None if it ended normally."""
    message = finish.error_message or ""
    if finish.reason == "error":
        code = finish.error_code or "engine_error"
        if code in _CLIENT_CODES:
            return InvalidRequest(message or f"The engine refused the request: {code}.", code=code)
        return StokerError(message or "The engine could not finish this request.", code=code)
    if finish.reason == "deadline":
        return DeadlineExceeded(message or "The deadline of the request passed before its answer was complete.")
    if finish.reason == "cancelled":
        return StokerError(message or "The request was cancelled.", code="cancelled")
    return None


def _of_aiohttp(error: web.HTTPException) -> HttpError:
    """Convert what aiohttp itself refuses: unknown paths, wrong methods, bodies above the size limit."""
    headers = {name: error.headers[name] for name in _PASSED_HEADERS if name in error.headers}
    if error.status == 413:
        headers["Connection"] = "close"
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    body = ErrorObject(message=error.text or error.reason, type=kind, code=_HTTP_CODES.get(error.status))
    return HttpError(error.status, body, headers)

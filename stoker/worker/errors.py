"""What an error looks like on HTTP: status, OpenAI's error object, headers. A table; nothing is sent or logged here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from aiohttp import web

from stoker.base.errors import (
    DeadlineExceeded,
    EngineDied,
    InvalidRequest,
    NotFound,
    Overloaded,
    StokerError,
)
from stoker.proto.openai.answers import ErrorBody
from stoker.sched.request import Finish

CLIENT_GONE_STATUS = 499  # never sent: what the log and the metrics say of a client that left
# The engine's words for a request that cannot be served.
_CLIENT_CODES = frozenset({"duplicate_lease", "invalid_grammar", "kv_too_small", "unknown_token"})


class ClientStalled(StokerError):
    """The client stopped reading; what it asked for is dropped."""

    code = "client_stalled"


class BodyTooSlow(StokerError):
    code = "request_timeout"
    retryable = True


@dataclass(frozen=True, slots=True)
class Problem:
    status: int
    body: ErrorBody
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        """Nobody foresaw it: the log should carry its trace."""
        return self.status == 500 and self.body.code == "internal_error"


def problem_of(error: BaseException) -> Problem:
    match error:
        case Overloaded():
            status = 429 if error.code == "rate_limited" else 503
            headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
            return Problem(status, _body(error, "overloaded_error"), headers)
        case EngineDied():
            return Problem(503, _body(error, "server_error"), {"Retry-After": "1"})
        case InvalidRequest():
            return Problem(400, _body(error, "invalid_request_error"))
        case NotFound():
            return Problem(404, _body(error, "invalid_request_error"))
        case DeadlineExceeded():
            return Problem(504, _body(error, "timeout_error"))
        case BodyTooSlow():
            return Problem(408, _body(error, "invalid_request_error"), {"Connection": "close"})
        case StokerError():
            return Problem(500, _body(error, "server_error"))
        case web.HTTPException():
            return _of_http(error)
        case RecursionError():
            # Nothing here is nested but by a client: it could be read, and not be written again with more around it.
            return problem_of(InvalidRequest("The request's body is nested too deeply.", code="invalid_json"))
        case _:
            # The message may hold what a client must not see: it goes to the log alone.
            message = "The server had an error while processing your request."
            return Problem(500, ErrorBody(message=message, type="server_error", code="internal_error"))


def error_of(finish: Finish) -> StokerError | None:
    """The error that a sequence's end stands for, if it does."""
    message = finish.error_message or ""
    if finish.reason == "error":
        code = finish.error_code or "engine_error"
        if code in _CLIENT_CODES:
            return InvalidRequest(message or f"The engine refused the request: {code}.", code=code)
        return StokerError(message or "The engine could not finish this request.", code=code)
    if finish.reason == "deadline":
        return DeadlineExceeded(message or "The request's deadline passed before its answer was complete.")
    if finish.reason == "cancelled":
        return StokerError(message or "The request was cancelled.", code="cancelled")
    return None


def _body(error: StokerError, kind: str) -> ErrorBody:
    return ErrorBody(message=error.message, type=kind, param=error.param, code=error.code)


def _of_http(error: web.HTTPException) -> Problem:
    """aiohttp's own refusals: unknown paths, wrong methods, bodies over the limit."""
    headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
    code = {401: "invalid_secret", 404: "unknown_url", 405: "method_not_allowed", 413: "body_too_large"}.get(
        error.status
    )
    if error.status == 413:
        headers["Connection"] = "close"
    message = error.text or error.reason
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return Problem(error.status, ErrorBody(message=message, type=kind, code=code), headers)

"""Errors as HTTP answers: the status, the headers and OpenAI's error object of every error of the project.

Gateway and workers use this one table. Nothing is sent or logged here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from stoker.base.errors import DeadlineExceeded, InvalidRequest, NotFound, Overloaded, StokerError
from stoker.proto.sse import encode_event

# Never sent. Logs, metrics and the usage ledger use it for a request whose client closed the connection.
CLIENT_GONE_STATUS = 499
# Never sent. The usage ledger uses it for a request that was running when its gateway was lost.
GATEWAY_LOST_STATUS = 599
UNEXPECTED_CODE = "internal_error"


class ErrorObject(msgspec.Struct, kw_only=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct):
    error: ErrorObject


@dataclass(frozen=True, slots=True)
class HttpError:
    """What a client gets for an error."""

    status: int
    error: ErrorObject
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_unexpected(self) -> bool:
        """True for a bug: the log should contain its traceback."""
        return self.status == 500 and self.error.code == UNEXPECTED_CODE

    def json(self) -> bytes:
        return msgspec.json.encode(ErrorAnswer(self.error))

    def event(self) -> bytes:
        """Return the error as the last event of a stream. No [DONE] follows it."""
        return encode_event(self.json())


@dataclass(frozen=True, slots=True)
class _Form:
    """The HTTP status, error type and headers that belong to an error code or an error class."""

    status: int
    type: str
    headers: Mapping[str, str] = field(default_factory=dict)


_RETRY = {"Retry-After": "1"}

# Looked up first, by `StokerError.code`.
_BY_CODE = {
    "answer_too_large": _Form(502, "server_error"),
    "engine_died": _Form(503, "server_error", _RETRY),
    "flex_unavailable": _Form(429, "overloaded_error"),
    "invalid_api_key": _Form(401, "invalid_request_error", {"WWW-Authenticate": "Bearer"}),
    "insufficient_quota": _Form(429, "overloaded_error"),
    "rate_limited": _Form(429, "overloaded_error"),
    "request_timeout": _Form(408, "invalid_request_error", {"Connection": "close"}),
    "worker_failed": _Form(502, "server_error", _RETRY),
    "worker_lost": _Form(502, "server_error", _RETRY),
}
# Looked up next: the first class that the error is an instance of.
_BY_CLASS = (
    (Overloaded, _Form(503, "overloaded_error")),
    (InvalidRequest, _Form(400, "invalid_request_error")),
    (NotFound, _Form(404, "invalid_request_error")),
    (DeadlineExceeded, _Form(504, "timeout_error")),
    (StokerError, _Form(500, "server_error")),
)


def http_error(error: BaseException, server: str) -> HttpError:
    """Return what a client gets for `error`. `server` names the process, such as "gateway", in the text for a bug."""
    if not isinstance(error, StokerError):
        # The message of a bug may contain what clients must not see. It goes only to the log.
        message = f"The {server} had an error while processing your request."
        return HttpError(500, ErrorObject(message=message, type="server_error", code=UNEXPECTED_CODE))
    form = _BY_CODE.get(error.code) or next(form for kind, form in _BY_CLASS if isinstance(error, kind))
    headers = dict(form.headers)
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    body = ErrorObject(message=error.message, type=form.type, param=error.param, code=error.code)
    return HttpError(form.status, body, headers)


def error_code(answer: bytes) -> str:
    """Return the code of an error answer, or an empty text if it has none."""
    try:
        return msgspec.json.decode(answer, type=ErrorAnswer).error.code or ""
    except msgspec.DecodeError:
        return ""


def error_message(answer: bytes) -> str:
    """Return the message of an error answer, or the answer itself if it has another form."""
    try:
        return msgspec.json.decode(answer, type=ErrorAnswer).error.message
    except msgspec.DecodeError:
        return answer[:500].decode(errors="replace")

"""Errors in the shape of Anthropic's API. Status and code are those of `proto/openai/errors.py`."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from stoker.proto.openai.errors import ErrorAnswer, ErrorObject
from stoker.proto.sse import encode_event

REQUEST_ID_HEADER = "request-id"  # where Anthropic's clients look for it

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class MessageErrorObject(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Anthropic's error object. `code` and `param` are additions: gateways decide by the code whether to retry."""

    type: str
    message: str
    code: str | None = None
    param: str | None = None


class MessageError(msgspec.Struct, kw_only=True):
    type: Literal["error"]  # required: it tells this shape from OpenAI's
    error: MessageErrorObject
    request_id: str | UnsetType = UNSET


def message_error(status: int, error: ErrorObject, request_id: str | None = None) -> MessageError:
    """Return an error of OpenAI's shape in Anthropic's."""
    return MessageError(
        type="error",
        error=MessageErrorObject(
            type=_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error"),
            message=error.message,
            code=error.code,
            param=error.param,
        ),
        request_id=request_id or UNSET,
    )


def message_error_body(status: int, body: bytes, request_id: str | None = None) -> bytes:
    """Return the body of an error response in Anthropic's shape. One that has it already stays as it is."""
    try:
        msgspec.json.decode(body, type=MessageError)
        return body
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        error = msgspec.json.decode(body, type=ErrorAnswer).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        error = ErrorObject(message=f"The worker answered with status {status}.", type="api_error")
    return msgspec.json.encode(message_error(status, error, request_id))


def message_error_event(error: MessageError) -> bytes:
    """Return the error as the last event of a stream."""
    return encode_event(msgspec.json.encode(error), "error")

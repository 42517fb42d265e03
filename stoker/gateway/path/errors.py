"""Errors between gateway and workers, and how every error is presented to a client. Pure: nothing is sent or logged here."""

from __future__ import annotations

import math

import msgspec

from stoker.base.errors import DeadlineExceeded, EngineDied, InvalidRequest, NotFound, Overloaded, StokerError
from stoker.base.ids import WorkerId
from stoker.gateway.admission.api_keys import Unauthorized
from stoker.gateway.api.client_body import EndpointKind
from stoker.gateway.api.reply import Headers, Reply, error_reply
from stoker.proto.openai.answers import ErrorAnswer, ErrorBody
from stoker.proto.sse import encode_event

CLIENT_GONE_STATUS = 499  # never sent; recorded in ledger, log and metrics when the client disconnected


class Refused(StokerError):
    """A worker answered with an error status. The client gets this response unchanged."""

    code = "worker_refused"

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        super().__init__(f"The worker answered with status {status}.")
        self.status = status
        self.headers = headers
        self.body = body


class LegFailed(StokerError):
    """A leg failed on its worker; another worker may succeed.

    `kind` is the failure kind reported to the fleet: connect, lost, timeout, status5xx or busy. `refused` is the worker's
    error response, if it sent one. The client gets it when no other worker can be tried.
    """

    code = "worker_failed"
    retryable = True

    def __init__(self, worker_id: WorkerId, kind: str, message: str, refused: Refused | None = None) -> None:
        super().__init__(message)
        self.worker_id = worker_id
        self.kind = kind
        self.refused = refused


class StreamBroken(StokerError):
    """The worker was lost after the client had received part of the answer, and no other worker could continue it."""

    code = "worker_lost"
    retryable = True


def reply_of(error: BaseException) -> Reply:
    """Return the HTTP response for an error, for a client that has not received a response head yet."""
    match error:
        case Refused():
            return Reply(error.status, error.headers, error.body)
        case Overloaded():
            status = 429 if error.code == "rate_limited" else 503
            reply = _reply(status, error, "overloaded_error")
            reply.headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
            return reply
        case Unauthorized():
            reply = _reply(401, error, "invalid_request_error")
            reply.headers.append((b"www-authenticate", b"Bearer"))
            return reply
        case InvalidRequest():
            return _reply(400, error, "invalid_request_error")
        case NotFound():
            return _reply(404, error, "invalid_request_error")
        case DeadlineExceeded():
            return _reply(504, error, "timeout_error")
        case LegFailed() | StreamBroken() | EngineDied():
            reply = _reply(502, error, "server_error")
            reply.headers.append((b"retry-after", b"1"))
            return reply
        case StokerError():
            return _reply(500, error, "server_error")
        case _:
            # The message of an unexpected exception may contain internal data, so it goes only to the log.
            message = "The gateway had an internal error while processing your request."
            return error_reply(500, message, code="internal_error", kind="server_error")


def is_unexpected(error: BaseException) -> bool:
    """Return True for an error outside Stoker's error classes: a bug, whose traceback belongs in the log."""
    return not isinstance(error, StokerError)


def code_of(error: BaseException) -> str:
    return error.code if isinstance(error, StokerError) else "internal_error"


def error_event(error: BaseException, kind: EndpointKind) -> bytes:
    """Return the error as the last event of a stream; no [DONE] follows it."""
    answer = _error_answer(error)
    if kind is not EndpointKind.RESPONSES:
        return encode_event(msgspec.json.encode(answer))
    body = answer.error
    event = {"type": "error", "code": body.code, "message": body.message, "param": body.param}
    return encode_event(msgspec.json.encode(event), "error")


def _error_answer(error: BaseException) -> ErrorAnswer:
    try:
        return msgspec.json.decode(reply_of(error).body, type=ErrorAnswer)
    except (msgspec.DecodeError, UnicodeDecodeError):  # the error body of a worker or proxy is not OpenAI-shaped
        return ErrorAnswer(ErrorBody(message=str(error), type="server_error", code=code_of(error)))


def _reply(status: int, error: StokerError, kind: str) -> Reply:
    return error_reply(status, error.message, code=error.code, kind=kind, param=error.param)

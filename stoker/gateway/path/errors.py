"""What goes wrong between gateway and workers, and what any error looks like to a client. Nothing is sent or logged here."""

from __future__ import annotations

import math

import msgspec

from stoker.base.errors import DeadlineExceeded, EngineDied, InvalidRequest, NotFound, Overloaded, StokerError
from stoker.base.ids import WorkerId
from stoker.gateway.admission.api_keys import Unauthorized
from stoker.gateway.api.client_body import Kind
from stoker.gateway.api.reply import Headers, Reply, error_reply
from stoker.proto.openai.answers import ErrorAnswer, ErrorBody
from stoker.proto.sse import encode_event

CLIENT_GONE_STATUS = 499  # never sent: what ledger, log and metrics say of a client that left


class Refused(StokerError):
    """A worker answered with an error of its own; the client gets it as it is."""

    code = "worker_refused"

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        super().__init__(f"The worker answered with status {status}.")
        self.status = status
        self.headers = headers
        self.body = body


class LegFailed(StokerError):
    """A worker did not do its part; another one might. `kind` is what the fleet is told: connect, lost, timeout, status5xx, busy.

    `refused` is what the worker said, if it said something: the last word when nobody else can be asked.
    """

    code = "worker_failed"
    retryable = True

    def __init__(self, worker_id: WorkerId, kind: str, message: str, refused: Refused | None = None) -> None:
        super().__init__(message)
        self.worker_id = worker_id
        self.kind = kind
        self.refused = refused


class StreamBroken(StokerError):
    """The worker was lost after the client had part of the answer, and nobody could go on with it."""

    code = "worker_lost"
    retryable = True


def reply_of(error: BaseException) -> Reply:
    """The answer that an error is to a client who has none yet."""
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
            # Its message may hold what a client must not see: it goes to the log alone.
            message = "The gateway had an error while processing your request."
            return error_reply(500, message, code="internal_error", kind="server_error")


def is_ours(error: BaseException) -> bool:
    """Nobody foresaw it: the log should carry its trace."""
    return not isinstance(error, StokerError)


def code_of(error: BaseException) -> str:
    return error.code if isinstance(error, StokerError) else "internal_error"


def error_event(error: BaseException, kind: Kind) -> bytes:
    """The error as a stream's last event; no [DONE] follows it."""
    told = _told(error)
    if kind is not Kind.RESPONSES:
        return encode_event(msgspec.json.encode(told))
    body = told.error
    event = {"type": "error", "code": body.code, "message": body.message, "param": body.param}
    return encode_event(msgspec.json.encode(event), "error")


def _told(error: BaseException) -> ErrorAnswer:
    try:
        return msgspec.json.decode(reply_of(error).body, type=ErrorAnswer)
    except (msgspec.DecodeError, UnicodeDecodeError):  # what a worker, or a proxy before it, said in its own way
        return ErrorAnswer(ErrorBody(message=str(error), type="server_error", code=code_of(error)))


def _reply(status: int, error: StokerError, kind: str) -> Reply:
    return error_reply(status, error.message, code=error.code, kind=kind, param=error.param)

"""What goes wrong between gateway and workers, and what any error looks like to a client. Nothing is sent or logged here."""

from __future__ import annotations

import msgspec

from stoker.base.errors import StokerError
from stoker.base.ids import WorkerId
from stoker.gateway.api.client_body import Kind
from stoker.gateway.api.reply import JSON, Headers, Reply
from stoker.proto.openai.errors import UNEXPECTED_CODE, ErrorAnswer, ErrorObject, http_error
from stoker.proto.sse import encode_event


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

    def __init__(self, worker_id: WorkerId, kind: str, message: str, refused: Refused | None = None) -> None:
        super().__init__(message)
        self.worker_id = worker_id
        self.kind = kind
        self.refused = refused


class StreamBroken(StokerError):
    """The worker was lost after the client had part of the answer, and nobody could go on with it."""

    code = "worker_lost"


def reply_of(error: BaseException) -> Reply:
    """The answer that an error is to a client who has none yet."""
    if isinstance(error, Refused):
        return Reply(error.status, error.headers, error.body)
    answer = http_error(error, "gateway")
    headers = [(name.lower().encode(), value.encode()) for name, value in answer.headers.items()]
    return Reply(answer.status, [JSON, *headers], answer.json())


def is_ours(error: BaseException) -> bool:
    """Nobody foresaw it: the log should carry its trace."""
    return not isinstance(error, StokerError)


def code_of(error: BaseException) -> str:
    return error.code if isinstance(error, StokerError) else UNEXPECTED_CODE


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
        return ErrorAnswer(ErrorObject(message=str(error), type="server_error", code=code_of(error)))

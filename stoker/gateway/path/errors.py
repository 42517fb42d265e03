"""Errors between gateway and workers, and how every error is presented to a client. Pure: nothing is sent or logged here."""

from __future__ import annotations

import msgspec

from stoker.base.errors import DeadlineExceeded, StokerError
from stoker.base.ids import WorkerId
from stoker.gateway.api.client_body import EndpointKind
from stoker.gateway.api.reply import JSON, Headers, Reply
from stoker.proto.anthropic.errors import REQUEST_ID_HEADER, message_error, message_error_body, message_error_event
from stoker.proto.internal_http import MESSAGES_PATH
from stoker.proto.openai.decode import nested_too_deeply
from stoker.proto.openai.errors import UNEXPECTED_CODE, ErrorAnswer, ErrorObject, http_error
from stoker.proto.sse import encode_event

_TIMED_OUT = 504
_MESSAGES = MESSAGES_PATH.encode()
_REQUEST_ID = REQUEST_ID_HEADER.encode()


class Refused(StokerError):
    """A worker answered with an error status. The client gets this response unchanged."""

    code = "worker_refused"

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        super().__init__(f"The worker answered with status {status}.")
        self.status = status
        self.headers = headers
        self.body = body


# What a client learns about a failed worker, by failure kind.
_WHAT_FAILED = {
    "connect": "The worker could not be reached",
    "lost": "The worker was lost before its answer was complete",
    "timeout": "The worker did not answer in time",
    "status5xx": "The worker answered with an error",
    "invalid": "The worker sent an answer that is not valid",
    "too_large": "The worker's answer is too large",
    "busy": "The worker is too busy",
}


class WorkerFailure(StokerError):
    """A worker failed. `detail` is for the log: it may name the worker's address, which clients must not see."""

    def __init__(self, message: str, worker_id: WorkerId, detail: str) -> None:
        super().__init__(message)
        self.worker_id = worker_id
        self.detail = detail


class LegFailed(WorkerFailure):
    """A leg failed on its worker; another worker may succeed.

    `kind` is the failure kind reported to the fleet: connect, lost, timeout, status5xx, invalid, too_large or busy. `detail` is
    for the log: it may contain the worker's address, and the message, which clients see, does not. `refused` is the worker's
    error response, if it sent one. The client gets it when no other worker can be tried.
    """

    code = "worker_failed"

    def __init__(self, worker_id: WorkerId, kind: str, detail: str, refused: Refused | None = None) -> None:
        super().__init__(f"{_WHAT_FAILED[kind]}; retry the request.", worker_id, detail)
        self.kind = kind
        self.refused = refused


class LegMoved(StokerError):
    """A worker that drains has handed the request off, as it was asked to. Another worker continues it."""

    code = "worker_moved"

    def __init__(self, worker_id: WorkerId, has_kv: bool) -> None:
        super().__init__(f"worker {worker_id} has handed the request off")
        self.worker_id = worker_id
        self.has_kv = has_kv  # the next worker can pull the KV


class WorkersFailed(StokerError):
    """Two workers failed while they ran this request, so no other worker gets it."""

    code = "worker_failed"


class BadAnswer(StokerError):
    """A worker's answer is not valid, or larger than the limits."""

    code = "bad_answer"


class AnswerTooLarge(BadAnswer):
    """A worker's answer, or one event of its stream, is larger than the limit. The client may have asked for that."""

    code = "answer_too_large"


class AnswerLate(DeadlineExceeded):
    """An answer that is not streamed was not complete in time, although the worker completed others meanwhile."""

    code = "answer_late"


class StreamBroken(WorkerFailure):
    """The worker was lost after the client had received part of the answer, and no other worker could continue it."""

    code = "worker_lost"

    def __init__(self, failed: LegFailed, why: str) -> None:
        message = f"The worker was lost in mid-stream, and {why}; send the request again."
        super().__init__(message, failed.worker_id, failed.detail)


def reply_of(error: BaseException) -> Reply:
    """Return the HTTP response for an error, for a client that has not received a response head yet."""
    if isinstance(error, Refused):
        return Reply(error.status, error.headers, error.body)
    answer = http_error(_known(error), "gateway")
    headers = [(name.lower().encode(), value.encode()) for name, value in answer.headers.items()]
    return Reply(answer.status, [JSON, *headers], answer.json())


def shaped_for(path: bytes, reply: Reply, request_id: bytes = b"") -> Reply:
    """Return an error reply in the shape of the API that `path` belongs to."""
    if not path.startswith(_MESSAGES):
        return reply
    body = message_error_body(reply.status, reply.body, request_id.decode() or None)
    headers = [(name, value) for name, value in reply.headers if name != _REQUEST_ID]
    return Reply(reply.status, [*headers, (_REQUEST_ID, request_id)] if request_id else headers, body)


def is_unexpected(error: BaseException) -> bool:
    """Return True for an error outside Stoker's error classes: a bug, whose traceback belongs in the log."""
    return not isinstance(_known(error), StokerError)


def has_used_worker(error: BaseException) -> bool:
    """Return True if a worker ran the request until a limit ended it: the client's deadline or the size of the answer."""
    if isinstance(error, Refused):
        return error.status == _TIMED_OUT
    return isinstance(error, AnswerTooLarge | DeadlineExceeded)


def code_of(error: BaseException) -> str:
    known = _known(error)
    return known.code if isinstance(known, StokerError) else UNEXPECTED_CODE


def _known(error: BaseException) -> BaseException:
    """Return the client's error for a RecursionError: only a client's JSON is nested.

    A body that could be decoded once may be too deep where less of the stack is left.
    """
    return nested_too_deeply() if isinstance(error, RecursionError) else error


def error_event(error: BaseException, kind: EndpointKind) -> bytes:
    """Return the error as the last event of a stream; no [DONE] follows it."""
    answer = _error_answer(error)
    if kind is EndpointKind.MESSAGES:
        return message_error_event(message_error(reply_of(error).status, answer.error))
    if kind is not EndpointKind.RESPONSES:
        return encode_event(msgspec.json.encode(answer))
    body = answer.error
    event = {"type": "error", "code": body.code, "message": body.message, "param": body.param}
    return encode_event(msgspec.json.encode(event), "error")


def _error_answer(error: BaseException) -> ErrorAnswer:
    try:
        return msgspec.json.decode(reply_of(error).body, type=ErrorAnswer)
    except (msgspec.DecodeError, UnicodeDecodeError):  # the error body of a worker or proxy is not OpenAI-shaped
        return ErrorAnswer(ErrorObject(message=str(error), type="server_error", code=code_of(error)))

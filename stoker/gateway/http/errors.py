"""Errors of the HTTP layer, and the error body that a client gets when its request is not valid HTTP."""

from __future__ import annotations

import json

from stoker.base.errors import Overloaded, StokerError

_TYPES = {429: "overloaded_error", 503: "overloaded_error"}


class Unreachable(StokerError):
    """No connection to the worker: refused, timed out, or the TLS handshake failed."""

    code = "worker_unreachable"


class ConnectTimeout(Unreachable):
    """No connection before the deadline. The worker may be down, or the worker or this process may have been slow."""


class NoSocketLeft(Overloaded):
    """This process cannot open more sockets. The worker is not at fault, so it is not marked as failed and not retried."""

    code = "no_socket_left"


class ResponseLost(StokerError):
    """The response did not arrive completely: the connection closed, it timed out, or it was not valid HTTP."""

    code = "answer_lost"


class ResponseTimeout(ResponseLost):
    """The response did not begin before the deadline."""

    code = "answer_late"


class ResponseTooLarge(ResponseLost):
    """The response is larger than the reader's limit. A retry would exceed it again."""

    code = "answer_too_large"


class ResponseAborted(StokerError):
    """The gateway aborted the response with `WorkerResponse.abort()`."""

    code = "answer_aborted"


class BadMessage(Exception):
    """Bytes that are not valid HTTP/1.1. `status` is the HTTP status sent back, where a response can be sent."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


def error_body(status: int, message: str, code: str | None = None) -> bytes:
    """Return an OpenAI-shaped error body, for responses that are made without a handler."""
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()

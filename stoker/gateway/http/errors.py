"""What can go wrong between two HTTP peers, and the static error body that a client sees when its request is not HTTP."""

from __future__ import annotations

import json

from stoker.base.errors import Overloaded, StokerError


class Unreachable(StokerError):
    """No connection to the worker: refused, timed out, or its TLS did not fit."""

    code = "worker_unreachable"


class ConnectTimeout(Unreachable):
    """No connection in time. Nobody may be there; or somebody was slow, and that may have been this process."""


class NoSocketLeft(Overloaded):
    """This process may open no more connections: nobody's fault but ours, so nobody else is to be blamed or asked."""

    code = "no_socket_left"


class AnswerLost(StokerError):
    """The worker took the request and did not answer it to the end: cut, timed out, or not HTTP."""

    code = "answer_lost"


class AnswerLate(AnswerLost):
    """No answer had begun when its time was over."""

    code = "answer_late"


class AnswerTooLarge(AnswerLost):
    """The answer is larger than its reader allows; a second try would be so, too."""

    code = "answer_too_large"


class AnswerAborted(StokerError):
    """We ourselves gave the answer up, by `Answer.abort()`."""

    code = "answer_aborted"


class BadMessage(Exception):
    """Bytes that are not the HTTP we speak; `status` is what the peer is told where it can be told something."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


def error_body(status: int, message: str, code: str | None = None) -> bytes:
    """An OpenAI-shaped error for answers that no handler makes."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()

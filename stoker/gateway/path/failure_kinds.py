"""Whose fault a worker's error response is: the client's, or the worker's, and of which kind."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from msgspec import UNSET

from stoker.base.errors import DeadlineExceeded, EngineDied
from stoker.gateway.path.call import Call

MAX_STRIKES = 2  # a request on which this many workers failed goes to no other worker
# Kinds of failure that a request may have caused.
STRIKES = frozenset({"lost", "timeout", "status5xx", "invalid", "too_large"})
# The kinds after which the worker's process or engine may be dead.
CRASHES = frozenset({"lost"})
# Failures of these kinds are reported to the fleet only once another worker has completed the same request.
NEEDS_SECOND_OPINION = frozenset({"status5xx", "too_large"})

_NOT_IMPLEMENTED = 501
_MODEL_NOT_FOUND = "model_not_found"
# The worker does not accept the gateway's own key or signature. No client sends these to a worker.
OWN_ACCESS = frozenset({401, 407})
_STATUSES = frozenset(HTTPStatus)


class _ErrorCode(msgspec.Struct):
    code: str | int | None = None


class _CodedError(msgspec.Struct):
    error: _ErrorCode | None = None


def kind_of(call: Call, status: int, body: bytes, now: float) -> str | None:
    """Return the failure kind of an error response, or None if the client must get it and the worker is not to blame.

    Only overload (429, 503), other 5xx, a worker that refuses the gateway itself, and one that has been given another model
    are a worker's failures. The exception is a deadline that the client has set.
    """
    if status == 429 or (status == 404 and _error_code(body) == _MODEL_NOT_FOUND):
        return "busy"
    if status in OWN_ACCESS:
        return "status5xx"
    if status < 500 or status == _NOT_IMPLEMENTED:
        return None
    if status == 503:
        return "lost" if _error_code(body) == EngineDied.code else "busy"
    if status == 504 and _is_own_deadline(call, body, now):
        return None
    return "status5xx"


def known_status(status: int) -> int:
    """Map a non-standard error status such as 529 to a standard one of its class."""
    return status if status in _STATUSES else 503 if status >= 500 else 400


def _is_own_deadline(call: Call, body: bytes, now: float) -> bool:
    """Return True if the client has set `timeout_s`, and the worker names it as the reason or it has passed."""
    timeout_s = _timeout_s(call)
    if timeout_s is None:
        return False
    return _error_code(body) == DeadlineExceeded.code or now - call.arrived_s >= timeout_s


def _timeout_s(call: Call) -> float | None:
    raw = call.envelope.timeout_s
    if raw is UNSET:
        return None
    try:
        return msgspec.json.decode(raw, type=float | None)
    except msgspec.DecodeError:
        return None


def _error_code(body: bytes) -> str | int | None:
    try:
        answer = msgspec.json.decode(body, type=_CodedError)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return None if answer.error is None else answer.error.code

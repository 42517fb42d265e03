"""The table of errors on HTTP: status, type and headers of each."""

from __future__ import annotations

import msgspec
import pytest

from stoker.base.errors import (
    ContextTooLong,
    DeadlineExceeded,
    EngineDied,
    InvalidRequest,
    NotFound,
    Overloaded,
    StokerError,
)
from stoker.base.ids import WorkerId
from stoker.gateway.admission.api_keys import Unauthorized
from stoker.gateway.path.errors import LegFailed, StreamBroken
from stoker.proto.openai.errors import http_error
from stoker.worker.errors import BodyTooSlow


@pytest.mark.parametrize(
    ("error", "status", "kind", "headers"),
    [
        (InvalidRequest("no", param="n"), 400, "invalid_request_error", {}),
        (ContextTooLong("long"), 400, "invalid_request_error", {}),
        (Unauthorized("who"), 401, "invalid_request_error", {"WWW-Authenticate": "Bearer"}),
        (NotFound("none"), 404, "invalid_request_error", {}),
        (BodyTooSlow("slow"), 408, "invalid_request_error", {"Connection": "close"}),
        (Overloaded("later", retry_after_s=2.1, code="rate_limited"), 429, "overloaded_error", {"Retry-After": "3"}),
        (Overloaded("later", retry_after_s=0.1), 503, "overloaded_error", {"Retry-After": "1"}),
        (StokerError("oh", code="engine_error"), 500, "server_error", {}),
        (
            StreamBroken(LegFailed(WorkerId("w"), "lost", "cut"), "it is gone"),
            502,
            "server_error",
            {"Retry-After": "1"},
        ),
        (EngineDied("died"), 503, "server_error", {"Retry-After": "1"}),
        (DeadlineExceeded("late"), 504, "timeout_error", {}),
    ],
)
def test_each_error_has_its_status(error: StokerError, status: int, kind: str, headers: dict[str, str]) -> None:
    answer = http_error(error, "gateway")
    assert (answer.status, dict(answer.headers)) == (status, headers)
    body = msgspec.json.decode(answer.json())["error"]
    assert body == {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    assert not answer.is_unexpected


def test_the_message_of_a_bug_is_not_shown() -> None:
    answer = http_error(KeyError("a secret"), "gateway")
    assert (answer.status, answer.is_unexpected) == (500, True)
    assert b"secret" not in answer.json()
    assert answer.error.message == "The gateway had an error while processing your request."

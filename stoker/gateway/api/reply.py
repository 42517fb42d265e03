"""Replies that the gateway makes itself: JSON, text, or an error in OpenAI's shape. Nothing is sent here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from stoker.proto.openai.errors import ErrorAnswer, ErrorObject

Headers = list[tuple[bytes, bytes]]

JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete HTTP response."""

    status: int
    headers: Headers
    body: bytes


def json_reply(value: Any, status: int = 200) -> Reply:
    return Reply(status, [JSON], msgspec.json.encode(value) + b"\n")


def text_reply(text: bytes, content_type: bytes, *more: tuple[bytes, bytes]) -> Reply:
    return Reply(200, [(b"content-type", content_type), *more], text)


def method_not_allowed(path: bytes, method: bytes, allowed: Sequence[bytes]) -> Reply:
    """Return the 405 reply for a known path. `allowed` are the methods that it accepts."""
    methods = b", ".join(allowed)
    message = f"{path.decode()} accepts {methods.decode()}, not {method.decode('latin-1')}."
    reply = error_reply(405, message, code="method_not_allowed")
    return Reply(reply.status, [*reply.headers, (b"allow", methods)], reply.body)


def error_reply(
    status: int, message: str, *, code: str | None, kind: str = "invalid_request_error", param: str | None = None
) -> Reply:
    body = ErrorAnswer(error=ErrorObject(message=message, type=kind, param=param, code=code))
    return Reply(status, [JSON], msgspec.json.encode(body))

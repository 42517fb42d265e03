"""A whole answer that the gateway itself gives: JSON, text or an error in OpenAI's shape. Nothing is sent here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from stoker.proto.openai.errors import ErrorAnswer, ErrorObject

Headers = list[tuple[bytes, bytes]]

JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Headers
    body: bytes


def json_reply(value: Any, status: int = 200) -> Reply:
    return Reply(status, [JSON], msgspec.json.encode(value) + b"\n")


def text_reply(text: bytes, content_type: bytes, *more: tuple[bytes, bytes]) -> Reply:
    return Reply(200, [(b"content-type", content_type), *more], text)


def error_reply(
    status: int, message: str, *, code: str | None, kind: str = "invalid_request_error", param: str | None = None
) -> Reply:
    body = ErrorAnswer(error=ErrorObject(message=message, type=kind, param=param, code=code))
    return Reply(status, [JSON], msgspec.json.encode(body))

"""Reads the lines of a batch's input file, piece by piece, and names those that are wrong."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Raw

from stoker.base.errors import InvalidRequest
from stoker.gateway.api.client_body import client_fields
from stoker.proto.internal_http import CHAT_PATH, COMPLETIONS_PATH, MESSAGES_PATH, RESPONSES_PATH

_FLEX = {"service_tier": Raw(b'"flex"')}
_WHOLE = _FLEX | {"stream": Raw(b"false")}
_UNSTORED = _WHOLE | {"store": Raw(b"false")}
# The endpoints of batches, with the fields that the body of each line gets.
ENDPOINTS: Mapping[str, Mapping[str, Raw]] = {
    CHAT_PATH: _UNSTORED,
    COMPLETIONS_PATH: _WHOLE,
    RESPONSES_PATH: _UNSTORED,
    MESSAGES_PATH: _WHOLE,
    "/v1/embeddings": _FLEX,
    "/v1/rerank": _FLEX,
    "/v2/rerank": _FLEX,
    "/rerank": _FLEX,
    "/v1/score": _FLEX,
    "/score": _FLEX,
}
_MAX_ERRORS = 100
_MAX_CUSTOM_ID_CHARS = 512


class _InputLine(msgspec.Struct):
    """One request of a batch."""

    custom_id: str
    method: str
    url: str
    body: Raw  # decoded with a bound on its fields


_LINE: msgspec.json.Decoder[_InputLine] = msgspec.json.Decoder(_InputLine)


class BatchReader:
    """Turns pieces of a file into requests. `errors` has what is wrong, with the number of the line."""

    def __init__(self, endpoint: str, max_lines: int, max_line_bytes: int) -> None:
        self._endpoint = endpoint
        self._max_lines = max_lines
        self._max_line_bytes = max_line_bytes
        self._rest = bytearray()  # the beginning of a line whose end has not come
        self._seen: set[bytes] = set()  # hashes of custom ids, which may be long
        self._num_lines = 0
        self.num_requests = 0
        self._has_stopped = False  # nothing after the last error can be read
        self.errors: list[dict[str, Any]] = []

    @property
    def is_hopeless(self) -> bool:
        """Return True if so much is wrong that the rest need not be read."""
        return self._has_stopped or len(self.errors) >= _MAX_ERRORS

    def push(self, data: bytes) -> list[tuple[int, str, bytes]]:
        """Return the requests in the whole lines so far: number of the line, custom id and body."""
        first, *others = data.split(b"\n")
        self._rest += first
        lines = [bytes(self._rest), *others[:-1]] if others else []
        if others:
            self._rest = bytearray(others[-1])
        if len(self._rest) > self._max_line_bytes:
            self._wrong(
                "line_too_long", f"The line is longer than {self._max_line_bytes} bytes.", at=self._num_lines + 1
            )
            self._has_stopped = True
        return [request for line in lines if (request := self._request(line)) is not None]

    def lost_input(self) -> None:
        """Note that the rest of the file cannot be read."""
        self._has_stopped, self._rest = True, bytearray()
        self._wrong("input_file_gone", "The input file was deleted or has expired.", "input_file_id", at=None)

    def finish(self) -> list[tuple[int, str, bytes]]:
        """Return the request in a last line without a line break."""
        rest, self._rest = bytes(self._rest), bytearray()
        last = self._request(rest) if rest else None
        if not self.num_requests and not self.errors:
            self._wrong("empty_file", "The input file has no requests.", at=None)
        return [] if last is None else [last]

    def _request(self, line: bytes) -> tuple[int, str, bytes] | None:
        self._num_lines += 1
        if not line.strip() or self.is_hopeless:
            return None
        given = self._decoded(line)
        if given is None or not self._is_valid(given):
            return None
        try:
            body = client_fields(bytes(given.body))
        except InvalidRequest as error:
            self._wrong("invalid_line", f"The line is not a request: {error.message}", "body")
            return None
        self._seen.add(_digest(given.custom_id))
        self.num_requests += 1
        return self._num_lines, given.custom_id, msgspec.json.encode({**body, **ENDPOINTS[self._endpoint]})

    def _decoded(self, line: bytes) -> _InputLine | None:
        try:
            return _LINE.decode(line)
        except msgspec.ValidationError as error:
            self._wrong("invalid_line", f"The line is not a request: {error}.")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._wrong("invalid_json_line", "The line is not valid JSON.")
        return None

    def _is_valid(self, given: _InputLine) -> bool:
        num_errors = len(self.errors)
        if not 0 < len(given.custom_id) <= _MAX_CUSTOM_ID_CHARS or "\0" in given.custom_id:
            what = f"'custom_id' must have 1 to {_MAX_CUSTOM_ID_CHARS} characters."
            self._wrong("invalid_custom_id", what, "custom_id")
        elif _digest(given.custom_id) in self._seen:
            self._wrong("duplicate_custom_id", f"{given.custom_id!r} is used by an earlier line.", "custom_id")
        if given.method != "POST":
            self._wrong("invalid_method", f"'method' must be POST, not {given.method[:20]!r}.", "method")
        if given.url != self._endpoint:
            self._wrong("invalid_url", f"'url' must be the batch's endpoint, {self._endpoint}.", "url")
        if self.num_requests >= self._max_lines:
            self._wrong("too_many_requests", f"A batch may have {self._max_lines} requests.")
            self._has_stopped = True
        return len(self.errors) == num_errors

    def _wrong(self, code: str, message: str, param: str | None = None, at: int | None = -1) -> None:
        line = self._num_lines if at == -1 else at
        self.errors.append({"code": code, "line": line, "message": message, "param": param})


def _digest(custom_id: str) -> bytes:
    return blake2b(custom_id.encode(), digest_size=16).digest()

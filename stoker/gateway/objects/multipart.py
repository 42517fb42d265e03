"""Reads `multipart/form-data`, the body of a file upload (RFC 7578). The whole body is in memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stoker.base.errors import InvalidRequest

_BOUNDARY = re.compile(rb'multipart/form-data\s*;(?:.*;)?\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_DISPOSITION = re.compile(rb"content-disposition:[ \t]*form-data[ \t]*(;[^\r\n]*)", re.IGNORECASE)
# It begins with a literal and has a bounded name, so that no text takes quadratic time.
_PARAMETER = re.compile(rb';[ \t]{0,8}(\w{1,64})="((?:[^"\\]|\\.)*)"')
_MAX_PARTS = 16
_MAX_HEAD_BYTES = 8 << 10


@dataclass(frozen=True, slots=True)
class FormPart:
    """One field of a form. A file has a name."""

    data: memoryview
    filename: str | None


def read_form(content_type: bytes | None, body: bytes) -> dict[str, FormPart]:
    """Return the fields of a form. Raises InvalidRequest if the body is not one."""
    found = _BOUNDARY.match(content_type or b"")
    if found is None:
        raise InvalidRequest(
            "Send the file as 'multipart/form-data', with the fields 'file' and 'purpose'.", param="file"
        )
    mark = b"--" + (found.group(1) or found.group(2))
    view, parts = memoryview(body), dict[str, FormPart]()
    start, num_parts = body.find(mark), 0
    while start >= 0 and num_parts <= _MAX_PARTS:
        start += len(mark)
        if body[start : start + 2] == b"--":
            return parts
        end = body.find(b"\r\n" + mark, start)
        head_end = body.find(b"\r\n\r\n", start, start + _MAX_HEAD_BYTES)
        if end < 0 or not start <= head_end <= end:
            break
        name, filename = _named(body[start:head_end])
        parts[name] = FormPart(view[head_end + 4 : end] if head_end + 4 <= end else view[:0], filename)
        start, num_parts = end + 2, num_parts + 1
    raise InvalidRequest(
        "The 'multipart/form-data' body is not valid: a part is cut off, or there are too many.", param="file"
    )


def _named(head: bytes) -> tuple[str, str | None]:
    found = _DISPOSITION.search(head)
    given = {} if found is None else {name.lower(): value for name, value in _PARAMETER.findall(found.group(1))}
    if b"name" not in given:
        raise InvalidRequest("A part of the form has no name.", param="file")
    filename = given.get(b"filename")
    return given[b"name"].decode("utf-8", "replace"), None if filename is None else filename.decode("utf-8", "replace")

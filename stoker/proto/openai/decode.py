"""Decodes request bodies. Errors have OpenAI's wording and the name of the field."""

from __future__ import annotations

import functools
import re
import threading
from typing import Any, TypeVar

import msgspec

from stoker.base.errors import InvalidRequest

T = TypeVar("T", bound=msgspec.Struct)

_MISSING = re.compile(r"Object missing required field `([^`]+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]+)`")
_PLACE = re.compile(r" - at `(?:key in )?\$([^`]*)`$")


_FIELDS: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])


# While msgspec makes a decoder, it stores incomplete type information at the Struct's class. A second thread that makes a
# decoder of the same or an enclosing Struct at that time would use it, which crashes the process.
_making = threading.Lock()


@functools.cache
def _decoder(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    with _making:
        return msgspec.json.Decoder(kind)


def decode(kind: type[T], body: bytes) -> T:
    """Decode a request body. Raises InvalidRequest, with the field in `param`."""
    request: T = _decoded(_decoder(kind), body)
    return request


def field_names(body: bytes) -> set[str]:
    """Return the names of the top-level fields of a request body."""
    return set(_decoded(_FIELDS, body))


def _decoded(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as wrong:
        raise _named(str(wrong)) from None
    except msgspec.DecodeError as wrong:
        raise InvalidRequest(f"The request body is not valid JSON: {wrong}.", code="invalid_json") from None
    except UnicodeDecodeError:
        raise InvalidRequest("The request body is not valid UTF-8.", code="invalid_json") from None
    except RecursionError:
        raise nested_too_deeply() from None


def nested_too_deeply() -> InvalidRequest:
    """Return the error for a body that cannot be decoded, or not be encoded again inside another object."""
    return InvalidRequest("The request body is nested too deeply.", code="invalid_json")


def convert(kind: type[T], value: object, param: str) -> T:
    """Convert the value of the field `param`, which is decoded already."""
    _decoder(kind)  # so that msgspec knows the Struct
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as wrong:
        raise _named(str(wrong), param) from None


def _named(wrong: str, within: str = "") -> InvalidRequest:
    """Turn a message of msgspec, such as "Expected `int` >= 1 - at `$.n`", into OpenAI's wording with `param`."""
    place = _PLACE.search(wrong)
    path = (within + (place.group(1).replace("[...]", "") if place else "")).removeprefix(".")
    what = wrong[: place.start()] if place else wrong
    if missing := _MISSING.fullmatch(what):
        field = f"{path}.{missing.group(1)}" if path else missing.group(1)
        return InvalidRequest(f"Missing required parameter: '{field}'.", param=field, code="missing_required_parameter")
    if unknown := _UNKNOWN.fullmatch(what):
        field = f"{path}.{unknown.group(1)}" if path else unknown.group(1)
        return InvalidRequest(f"Unrecognized request argument supplied: {field}", param=field, code="unknown_parameter")
    if not path:
        return InvalidRequest(f"The request body must be a JSON object: {what[0].lower()}{what[1:]}.")
    return InvalidRequest(f"Invalid value for '{path}': {what[0].lower()}{what[1:]}.", param=path, code="invalid_value")

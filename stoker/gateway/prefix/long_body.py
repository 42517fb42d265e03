"""Decodes long request bodies on a thread without holding the interpreter lock (GIL) for long.

msgspec holds the lock for a whole call, which stops the event loop too. So the items of long lists are decoded one by one,
and the event loop can run between two of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec
from msgspec import Raw

from stoker.base.errors import InvalidRequest
from stoker.gateway.api.client_body import fields
from stoker.proto.openai.decode import decode

MAX_EXACT_BYTES = 8 << 20  # more than a million tokens of text; longer bodies are compared as text
_MAX_OBJECTS = 25_000  # JSON objects and lists: with more, decoding and garbage collection take too long
_MAX_COMMAS = 250_000  # bounds the numbers in a list of token ids, which one call decodes
_WHOLE_BYTES = 1 << 16
_ITEMS: msgspec.json.Decoder[list[Raw]] = msgspec.json.Decoder(list[Raw])

T = TypeVar("T", bound=msgspec.Struct)


def decode_body(kind: type[T], body: bytes, lists: Mapping[str, type[msgspec.Struct]]) -> T:
    """Return the same as `decode(kind, body)`. `lists` are the fields to decode item by item, and their items' types.

    Raises InvalidRequest if the body is invalid, or too large to be worth decoding.
    """
    if len(body) <= _WHOLE_BYTES:
        return decode(kind, body)
    too_large = len(body) > MAX_EXACT_BYTES or body.count(b",") > _MAX_COMMAS
    if too_large or body.count(b"{") + body.count(b"[") > _MAX_OBJECTS:
        raise InvalidRequest(f"the body is too large for exact prefix keys: {len(body)} bytes")
    try:
        table = fields(body)
        found = {
            name: [decode(lists[name], one) for one in _ITEMS.decode(table[name])] for name in lists if name in table
        }
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return decode(kind, body)  # not a list of objects
    for name in found:
        table[name] = Raw(b"null")
    whole = decode(kind, msgspec.json.encode(table))
    for name, items in found.items():
        setattr(whole, name, items)
    return whole
